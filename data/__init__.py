"""Token files, tokenizers, and the loader whose step t is a pure function of (seed, t).

A data set is a folder with `train.bin` and `val.bin`, written by `python data/NAME/prepare.py`. From top to
bottom: tokenizers, the file format (TokenWriter, TokenFile), the stream of documents (Stream), the steps cut
from it (Loader, Batch), and at the end what the prepare scripts share.

Layout of a token file, all little-endian:

    header      4096 bytes: magic, version, length and crc32 of a JSON text, the JSON text, zeros
    tokens      uint16 or uint32 [n_tokens], the documents one after the other, without EOS
    zeros       to the next multiple of 8 bytes
    offsets     int64 [n_docs + 1], document d is tokens[offsets[d] : offsets[d + 1]]
    token_bytes int32 [vocab_size], how many bytes of text a token stands for (EOS: 0), for bits per byte
    label_mask  uint8 [n_tokens], only in files whose labels are masked: 1 = this token is an answer
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import struct
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import tiktoken
import torch

IGNORE = -100  # the label that torch's cross_entropy leaves out
MAGIC = b"nanoMSA\n"
VERSION = 1
HEADER_BYTES = 4096
_HEAD = struct.Struct("<8sIII")  # magic, version, length of the JSON text, its crc32
_META = {  # the fields of the JSON text
    "dtype": str,
    "n_tokens": int,
    "n_docs": int,
    "n_bytes": int,
    "vocab_size": int,
    "tokenizer": str,
    "eos": int,
    "label_mask": bool,
    "sha256": str,
    "source": str,
}


# --- tokenizers ---------------------------------------------------------------------------------------------


_GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_GPT2_FILES = " and ".join(  # tiktoken looks for a file by the sha1 of its address
    f"{_GPT2_URL}{name}, named {hashlib.sha1((_GPT2_URL + name).encode()).hexdigest()},"
    for name in ("vocab.bpe", "encoder.json")
)


def get_tokenizer(name: str) -> tiktoken.Encoding:
    """The tokenizer "gpt2" (tiktoken downloads its vocabulary once) or "bytes" (the 256 bytes, built here).

    Both have one special token, `<|endoftext|>`, which is `.eot_token`. ValueError on another name, or if the
    gpt2 vocabulary is neither cached nor to be downloaded.
    """
    if name == "bytes":
        # No two bytes merge, so how the pattern cuts text decides speed alone: 64 characters a match is four
        # times as fast as one, and a match of bounded length stays linear on files of a single line.
        return tiktoken.Encoding(
            name="bytes",
            pat_str=r"(?s:.{1,64})",
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|endoftext|>": 256},
        )
    if name == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:  # requests' exceptions are OSErrors
            raise ValueError(
                "tokenizer 'gpt2': its vocabulary is not cached here and could not be downloaded "
                f"({type(error).__name__}). Run once with a network, or set TIKTOKEN_CACHE_DIR to a folder "
                f"that holds local copies of {_GPT2_FILES} or use 'bytes', which needs no download."
            ) from error
    raise ValueError(f"tokenizer is {name!r}; allowed are 'gpt2' and 'bytes'")


def encode(tokenizer: tiktoken.Encoding, text: str) -> np.ndarray:
    """Text to tokens, uint32 [n]. Special tokens in it are ordinary text; lone surrogates become U+FFFD.

    Text is encoded in pieces of 2^18 characters, because a run of about a million blanks overflows the regex
    stack of gpt2's pattern. Decoding gives the text back whatever the pieces are.
    """
    pieces = []
    for i in range(0, len(text), 1 << 18):
        piece = text[i : i + (1 << 18)]
        try:
            pieces.append(tokenizer.encode_to_numpy(piece, disallowed_special=()))
        except UnicodeEncodeError:
            piece = piece.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            pieces.append(tokenizer.encode_to_numpy(piece, disallowed_special=()))
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint32)


# --- the file format ----------------------------------------------------------------------------------------


class TokenWriter:
    """Writes a token file document by document; as a context manager, an exception leaves no file behind.
    ValueError on what does not fit, OSError where the disk refuses.

    The file grows beside `path` (`train.tmp.bin` for `train.bin`) and is renamed into place by `close`, so
    what lies at `path` is always whole. Tokens go to disk as they come; only offsets stay in memory.

    tokenizer: its vocabulary, EOS and name go into the header. source: where the text comes from, for people.
    labels: the file has a label mask, and every `add` brings one.
    """

    def __init__(
        self, path: str | os.PathLike, *, tokenizer: tiktoken.Encoding, source: str, labels: bool = False
    ) -> None:
        self.path = Path(path)
        self.tmp = self.path.with_name(f"{self.path.stem}.tmp{self.path.suffix}")
        self.vocab_size, self.eos = tokenizer.n_vocab, tokenizer.eot_token
        self.token_bytes = np.zeros(self.vocab_size, "<i4")
        for i in range(self.vocab_size):
            if i != self.eos:
                self.token_bytes[i] = len(tokenizer.decode_single_token_bytes(i))
        self.n_tokens = self.n_docs = self.n_bytes = self.longest = 0
        self._tokenizer, self._source = tokenizer.name, source
        self._dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        self._ends: list[int] = []
        self._hash = hashlib.sha256()
        self._finished = False
        with self._names_the_file():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._mask = tempfile.TemporaryFile(dir=self.path.parent) if labels else None
            self._file = open(self.tmp, "wb")
            self._file.write(bytes(HEADER_BYTES))

    def add(self, tokens: Any, mask: Any = None) -> None:
        """Append one document; an empty one is skipped.

        tokens: integers [n] in 0..vocab_size-1, without EOS. mask: [n] of 0 and 1, 1 = this token is an
        answer; given exactly if the file was opened with labels=True. ValueError on anything else.
        """
        tokens = np.asarray(tokens)
        if tokens.size == 0:
            return
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"tokens are {tokens.dtype} {tokens.shape}; they must be integers of one dimension"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(
                f"tokens lie in {tokens.min()}..{tokens.max()}; tokenizer {self._tokenizer!r} has "
                f"0..{self.vocab_size - 1}: encode the text with that tokenizer"
            )
        if (tokens == self.eos).any():
            raise ValueError(f"tokens hold EOS ({self.eos}); the loader adds it: encode with encode_ordinary")
        if (mask is not None) != (self._mask is not None):
            raise ValueError("mask must be given exactly if the writer was opened with labels=True")
        if self._mask is not None:
            mask = np.asarray(mask)
            if mask.shape != tokens.shape or ((mask != 0) & (mask != 1)).any():
                raise ValueError(
                    f"mask is {mask.dtype} {mask.shape}; it must be 0 or 1 for each of {tokens.shape}"
                )
            with self._names_the_file():
                self._mask.write(mask.astype(np.uint8))
        with self._names_the_file():
            self._write(tokens.astype(self._dtype))
        self.n_docs += 1
        self.n_tokens += len(tokens)
        self.n_bytes += int(self.token_bytes[tokens].sum())
        self.longest = max(self.longest, len(tokens))
        self._ends.append(self.n_tokens)

    def _write(self, data: Any) -> None:
        self._hash.update(data)
        self._file.write(data)

    def finish(self) -> None:
        """Write offsets, masks and header; all but the rename. ValueError if no document was added."""
        if self._finished:
            return
        if not self.n_docs:
            raise ValueError(
                f"{self.path} would hold no document: give more text, or a val_share or seed that leaves "
                "documents to train and val alike; a text file is one document unless --separator cuts it"
            )
        meta = {
            "dtype": self._dtype.name,
            "n_tokens": self.n_tokens,
            "n_docs": self.n_docs,
            "n_bytes": self.n_bytes,
            "vocab_size": self.vocab_size,
            "tokenizer": self._tokenizer,
            "eos": self.eos,
            "label_mask": self._mask is not None,
            "source": self._source,
        }
        with self._names_the_file():
            self._write(bytes(-self.n_tokens * self._dtype.itemsize % 8))
            self._write(np.array([0, *self._ends], "<i8"))
            self._write(self.token_bytes)
            if self._mask is not None:
                self._mask.seek(0)
                while chunk := self._mask.read(1 << 20):
                    self._write(chunk)
            text = json.dumps(meta | {"sha256": self._hash.hexdigest()}).encode()
            if len(text) > HEADER_BYTES - _HEAD.size:
                raise ValueError(f"source has {len(self._source)} characters, too many for the header")
            self._file.seek(0)
            self._file.write(_HEAD.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._release()
        self._finished = True

    def close(self) -> None:
        """Finish the file and rename it into place."""
        self.finish()
        with self._names_the_file():
            os.replace(self.tmp, self.path)
            _sync_folder(self.path.parent)

    def abort(self) -> None:
        """Drop what was written; nothing appears at the final path."""
        self._release()
        with contextlib.suppress(OSError):  # there is an error already, which says more
            self.tmp.unlink(missing_ok=True)

    def _release(self) -> None:
        for file in (self._file, self._mask):
            if file is not None:
                with contextlib.suppress(OSError):  # a full disk refuses what is still buffered
                    file.close()

    @contextlib.contextmanager
    def _names_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"cannot write {self.path}: {error.strerror or error}; see that its folder is there, may be "
                "written and has space, or give another --out"
            ) from error

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abort()  # nothing is left to do if it was closed


@contextlib.contextmanager
def write_splits(folder: Path, **options: Any) -> Iterator[tuple[TokenWriter, TokenWriter]]:
    """The writers of train.bin and val.bin in `folder`, which appear both or, after an error, not at all."""
    with (
        TokenWriter(folder / "train.bin", **options) as train,
        TokenWriter(folder / "val.bin", **options) as val,
    ):
        yield train, val
        train.finish()
        val.finish()


class TokenFile:
    """A token file, memory-mapped. ValueError if it is missing, cut short, damaged or of another version.

    tokens uint16 or uint32 [n_tokens]; offsets int64 [n_docs + 1]; label_mask uint8 [n_tokens] or None;
    token_bytes int32 [vocab_size]; vocab_size, eos, n_docs, n_bytes (of text); tokenizer (its name); source;
    hash, the sha256 of all that follows the header. The hash is not recomputed on load: `verify` does that.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"token file {self.path} does not exist: run the prepare.py of its data set")
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            head = file.read(HEADER_BYTES)
        if head[: len(MAGIC)] != MAGIC:
            raise self._error(f"it is no token file (it starts with {head[:8]!r}, not with {MAGIC!r})")
        if size < HEADER_BYTES:
            raise self._error(f"it is cut short ({size} bytes, the header alone has {HEADER_BYTES})")
        _, version, length, crc = _HEAD.unpack_from(head)
        if version == int.from_bytes(VERSION.to_bytes(4, "little"), "big"):
            raise self._error("it is big-endian, and the format is little-endian")
        if version != VERSION:
            raise self._error(f"it has format version {version}, this code reads version {VERSION}")
        text = head[_HEAD.size : _HEAD.size + length]
        if len(text) != length or zlib.crc32(text) != crc:
            raise self._error("its header is damaged (checksum)")
        meta = json.loads(text)
        for name, kind in _META.items():
            if type(meta.get(name)) is not kind:
                raise self._error(
                    f"its header has {name} = {meta.get(name)!r}, which must be {kind.__name__}"
                )
        if meta["dtype"] not in ("uint16", "uint32"):
            raise self._error(f"its header has dtype = {meta['dtype']!r}, allowed are 'uint16' and 'uint32'")
        for name, least in (("n_tokens", 1), ("n_docs", 1), ("n_bytes", 0), ("vocab_size", 1), ("eos", 0)):
            if meta[name] < least:
                raise self._error(f"its header has {name} = {meta[name]}, less than {least}")
        if meta["eos"] >= meta["vocab_size"]:
            raise self._error(f"its header has eos = {meta['eos']}, vocab_size = {meta['vocab_size']}")

        n, dtype = meta["n_tokens"], np.dtype(meta["dtype"]).newbyteorder("<")
        at_offsets = HEADER_BYTES + -(-n * dtype.itemsize // 8) * 8
        at_bytes = at_offsets + 8 * (meta["n_docs"] + 1)
        at_mask = at_bytes + 4 * meta["vocab_size"]
        expected = at_mask + (n if meta["label_mask"] else 0)
        if size != expected:
            raise self._error(
                f"its header asks for {expected} bytes, the file has {size} (cut short or damaged)"
            )
        raw = np.memmap(self.path, np.uint8, "r")
        self.tokens = raw[HEADER_BYTES : HEADER_BYTES + n * dtype.itemsize].view(dtype)
        self.offsets = np.array(raw[at_offsets:at_bytes].view("<i8"), np.int64)
        self.token_bytes = np.array(raw[at_bytes:at_mask].view("<i4"), np.int32)
        self.label_mask = raw[at_mask:] if meta["label_mask"] else None
        self.vocab_size, self.eos, self.tokenizer = meta["vocab_size"], meta["eos"], meta["tokenizer"]
        self.n_docs, self.n_bytes, self.source = meta["n_docs"], meta["n_bytes"], meta["source"]
        self.hash = meta["sha256"]
        if self.offsets[0] != 0 or self.offsets[-1] != n or (np.diff(self.offsets) < 1).any():
            raise self._error("its document offsets are damaged (they must rise from 0 to the token count)")

    def _error(self, what: str) -> ValueError:
        return ValueError(f"token file {self.path}: {what}: run the prepare.py of its data set again")

    def __len__(self) -> int:
        return len(self.tokens)

    def verify(self) -> None:
        """Read the whole file and compare it with the hash in its header; ValueError if they differ."""
        digest = hashlib.sha256()
        with open(self.path, "rb") as file:
            file.seek(HEADER_BYTES)
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() != self.hash:
            raise self._error(f"its content has sha256 {digest.hexdigest()}, its header says {self.hash}")


def find_dataset(name: str | os.PathLike) -> Path:
    """The folder of a prepared data set: a name under this folder (`pysrc`), or a path to any other folder.

    ValueError that names the command to run if the folder holds neither train.bin nor val.bin.
    """
    here = Path(__file__).resolve().parent
    own = here / name  # an absolute path stays as it is
    for folder in (own, Path(name)):
        if (folder / "train.bin").is_file() or (folder / "val.bin").is_file():
            return folder
    if (own / "prepare.py").is_file():
        raise ValueError(f"data set {str(name)!r} is not prepared: run `python data/{own.name}/prepare.py`")
    names = ", ".join(sorted(p.parent.name for p in here.glob("*/prepare.py")))
    raise ValueError(
        f"there is no data set {str(name)!r}: it must be one of {names}, or the path of a folder with "
        "train.bin or val.bin. `python data/pysrc/prepare.py` makes one from the Python sources of this "
        "machine, `python data/text/prepare.py --input FILES --out FOLDER` one from your own text."
    )


# --- the stream ---------------------------------------------------------------------------------------------


def _shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0..n-1, int64 [n]. numpy's own shuffles may change with its version; this may not."""
    key = np.frombuffer(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:8], "<u8").astype(np.uint64)
    x = key + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


class Stream:
    """The endless token stream: epoch after epoch, every document, one EOS, more EOS to the block border.

    Each epoch has its own shuffle, a pure function of (seed, epoch); shuffle=False keeps the file's order.
    `epoch_tokens` is the length of an epoch, EOS included, a multiple of block_size.
    """

    def __init__(self, file: TokenFile, *, seed: int, block_size: int, shuffle: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.file, self.seed, self.block_size, self.shuffle = file, seed, block_size, shuffle
        self._padded = (np.diff(file.offsets) // block_size + 1) * block_size  # (n_docs,)
        self.epoch_tokens = int(self._padded.sum())
        self._tokens = np.asarray(file.tokens)  # slices of a plain array are cheaper than those of a memmap
        self._mask = None if file.label_mask is None else np.asarray(file.label_mask)
        self._epoch = lru_cache(maxsize=2)(self._lay_out)  # two: a read may cross the border of an epoch

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's documents in order [n_docs], and where each starts in the epoch [n_docs + 1]; int64."""
        n = self.file.n_docs
        order = _shuffled(n, self.seed, epoch) if self.shuffle else np.arange(n)
        return order, np.concatenate(([0], np.cumsum(self._padded[order])))

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens start .. start + count - 1 of the stream; a pure function of (seed, start).

        start and count must be multiples of block_size, start >= 0, count > 0 (ValueError).
        Returns tokens int64 [count]; labels int64 [count], the next token of the stream, -100 where the
        input is EOS or the file's label mask leaves the label out; doc_start int64 [count // block_size],
        for each block the stream position at which its document starts.
        """
        block, file = self.block_size, self.file
        if start < 0 or start % block or count < 1 or count % block:
            raise ValueError(
                f"start is {start}, count {count}; both must be multiples of block_size ({block})"
            )
        stream = np.full(count + 1, file.eos, np.int64)  # one more: the last label
        answer = None if self._mask is None else np.zeros(count + 1, np.uint8)
        doc_start = np.empty(count // block, np.int64)
        at = 0  # a multiple of block_size: epochs are
        while at <= count:
            epoch, place = divmod(start + at, self.epoch_tokens)
            end = min(count + 1, at + self.epoch_tokens - place)
            order, starts = self._epoch(epoch)
            first = np.searchsorted(starts, place, "right") - 1
            last = np.searchsorted(starts, place + end - at, "left")
            docs = order[first:last]
            begins = (starts[first:last] - place + at).tolist()  # in `stream`; the first may lie before `at`
            lows, highs = file.offsets[docs].tolist(), file.offsets[docs + 1].tolist()
            # A loop over documents, of which there is at most one a block; EOS is there already.
            for to, lo, hi in zip(begins, lows, highs, strict=True):
                lo, to = lo + max(at - to, 0), max(at, to)
                n = min(hi - lo, end - to)
                if n > 0:
                    stream[to : to + n] = self._tokens[lo : lo + n]
                    if answer is not None:
                        answer[to : to + n] = self._mask[lo : lo + n]
            blocks = slice(at // block, min(end, count) // block)
            places = place + block * np.arange(blocks.stop - blocks.start)
            begun = starts[np.searchsorted(starts, places, "right") - 1]
            doc_start[blocks] = begun + epoch * self.epoch_tokens
            at = end
        if stream.max() >= file.vocab_size:  # or the embedding would be read out of bounds
            raise ValueError(
                f"token file {file.path}: it holds token {stream.max()} and a vocabulary of "
                f"{file.vocab_size}, so it is damaged: run the prepare.py of its data set again"
            )
        tokens = stream[:-1]
        ignored = tokens == file.eos
        if answer is not None:
            ignored |= answer[1:] == 0
        return tokens, np.where(ignored, IGNORE, stream[1:]), doc_start


# --- the loader ---------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """A rank's sequences of one step, on the CPU, and three counts over the whole step (all ranks)."""

    tokens: torch.Tensor  # int64 (B, S)
    labels: torch.Tensor  # int64 (B, S), -100 where there is nothing to predict
    doc_start_block: torch.Tensor | None  # int32 (B, S / block_size): first block of each block's document
    n_labels: int  # labels other than -100
    n_pad: int  # inputs that are EOS
    n_tokens: int  # tokens_per_step


class Loader:
    """Cuts the stream into steps: step t is its tokens [t * N, (t + 1) * N), N = tokens_per_step.

    Tokens and labels depend on (seed, step, place in the step) alone, so a run may change its sequence
    length, its world size, or stop and resume, and still trains on the same tokens in the same order.
    """

    def __init__(self, stream: Stream, *, tokens_per_step: int) -> None:
        if tokens_per_step < 1 or tokens_per_step % stream.block_size:
            block = stream.block_size
            raise ValueError(
                f"tokens_per_step is {tokens_per_step}; it must be a multiple of block_size ({block}), for "
                f"example {max(1, round(tokens_per_step / block)) * block}"
            )
        self.stream, self.tokens_per_step = stream, tokens_per_step

    def step(self, step: int, seq_len: int, document_mask: bool, rank: int = 0, world_size: int = 1) -> Batch:
        """One rank's share of a step: sequences [rank * n, (rank + 1) * n), n = N / seq_len / world_size.

        doc_start_block[b, i] is the first block, counted within sequence b, of the document that holds block
        i; a document cut by the start of the sequence starts again at 0. None if not document_mask.
        ValueError if seq_len is no multiple of block_size, does not divide N, or leaves sequences that
        world_size does not divide; it says which numbers would do.
        """
        n, block = self.tokens_per_step, self.stream.block_size
        if step < 0 or world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"step is {step}, rank {rank}, world_size {world_size}; they must be step >= 0 and "
                "0 <= rank < world_size"
            )
        if seq_len < 1 or seq_len % block or n % seq_len or n // seq_len % world_size:
            fits = [s for s in range(block, n + 1, block) if n % s == 0 and n // s % world_size == 0]
            near = sorted(sorted(fits, key=lambda s: abs(s - seq_len))[:6])
            raise ValueError(
                f"seq_len is {seq_len}; it must be a multiple of block_size ({block}) that cuts "
                f"tokens_per_step ({n}) into a number of sequences divisible by world_size ({world_size}); "
                + (f"possible: {', '.join(map(str, near))}" if near else "none does: change tokens_per_step")
            )
        tokens, labels, doc_start = self.stream.read(step * n, n)
        labels_count = int(np.count_nonzero(labels != IGNORE))
        pad_count = int(np.count_nonzero(tokens == self.stream.file.eos))
        share = n // seq_len // world_size
        mine = slice(rank * share, (rank + 1) * share)
        doc_start_block = None
        if document_mask:
            seq_start = step * n + seq_len * np.arange(n // seq_len)[:, None]  # (n / seq_len, 1)
            blocks = np.maximum(doc_start.reshape(-1, seq_len // block) - seq_start, 0) // block
            doc_start_block = torch.from_numpy(blocks[mine].astype(np.int32))
        return Batch(
            tokens=torch.from_numpy(tokens.reshape(-1, seq_len)[mine]),
            labels=torch.from_numpy(labels.reshape(-1, seq_len)[mine]),
            doc_start_block=doc_start_block,
            n_labels=labels_count,
            n_pad=pad_count,
            n_tokens=n,
        )


# --- what the prepare scripts share -------------------------------------------------------------------------

T = TypeVar("T")


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Runs a script and leaves with its exit code, after an error with one line on stderr: 2 if the input was
    bad (ValueError), 1 if the machine failed (OSError), 130 after Ctrl-C."""
    sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows what it can
    try:
        try:
            code = main()
        finally:
            sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:  # `| head` has read enough; what is left goes nowhere, without a word at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + 13)  # as if by SIGPIPE
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def prepare_parser(file: str, doc: str) -> argparse.ArgumentParser:
    """The options that all prepare scripts have; file and doc are the script's `__file__` and `__doc__`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=_HelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(file).resolve().parent, help="folder to write to")
    parser.add_argument(
        "--tokenizer", choices=("bytes", "gpt2"), default="bytes", help="gpt2 needs a download"
    )
    parser.add_argument("--seed", type=int, default=0, help="which documents go to validation, what is drawn")
    parser.add_argument(
        "--verify",
        action=_Verify,
        metavar="DATA_SET",
        default=argparse.SUPPRESS,
        help="read a prepared data set, compare it with the hashes in its headers, and stop",
    )
    return parser


class _Verify(argparse.Action):
    """Like --help: it needs no other option, and leaves when it is done."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: str, *_: Any) -> NoReturn:
        folder = find_dataset(value)
        for path in (folder / "train.bin", folder / "val.bin"):
            if path.is_file():
                file = TokenFile(path)
                file.verify()
                print(f"{path}: whole, {file.n_docs:,} documents, {len(file):,} tokens, sha256 {file.hash}")
        parser.exit()


def share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def add_split_options(parser: argparse.ArgumentParser, val_share: float) -> None:
    """--val_share and --workers, for the scripts that encode text that is there."""
    parser.add_argument(
        "--val_share", type=share, default=val_share, help="share of validation, above 0, below 1"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="threads that encode")


def unit_hash(key: str | bytes, seed: int) -> float:
    """A number in [0, 1) that is the same on every machine; documents below val_share are validation."""
    key = key.encode(errors="surrogatepass") if isinstance(key, str) else key
    return int.from_bytes(hashlib.sha256(f"{seed} ".encode() + key).digest()[:6], "big") / 2**48


def encode_many(
    tokenizer: tiktoken.Encoding, items: Iterable[tuple[T, str]], workers: int
) -> Iterator[tuple[T, np.ndarray]]:
    """(tag, text) to (tag, tokens uint32 [n]), in order. Threads: tiktoken encodes outside the GIL."""

    def batches() -> Iterator[list[tuple[T, str]]]:
        batch, size = [], 0
        for item in items:
            batch.append(item)
            size += len(item[1])
            if size >= 1 << 20 or len(batch) >= 1024:
                yield batch
                batch, size = [], 0
        yield batch

    def work(batch: list[tuple[T, str]]) -> list[tuple[T, np.ndarray]]:
        return [(tag, encode(tokenizer, text)) for tag, text in batch]

    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")
    with ThreadPoolExecutor(workers) as pool:
        pending = deque()
        for batch in batches():
            pending.append(pool.submit(work, batch))
            if len(pending) > 2 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


class Progress:
    """A progress line on stderr: five times a second on a terminal, else every ten seconds."""

    def __init__(self, unit: str, total: int | None = None) -> None:
        self.unit, self.total, self.done = unit, total, 0
        self.start = self.shown = time.monotonic()

    def add(self, n: int) -> None:
        self.done += n
        now, tty = time.monotonic(), sys.stderr.isatty()
        if now - self.shown > (0.2 if tty else 10):
            self.shown = now
            share = f" of {self.total:,} ({self.done / self.total:.0%})" if self.total else ""
            rate = self.done / (now - self.start)
            line = f"{self.done:,}{share} {self.unit}, {rate:,.0f}/s"
            print(f"\r\033[K{line}" if tty else line, end="" if tty else "\n", file=sys.stderr, flush=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON beside `path` and rename it into place; OSError that names it where the disk refuses."""
    tmp = path.with_name(path.name + ".tmp")
    try:
        with open(tmp, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error.strerror or error}; see that there is space") from error


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut (where folders can be opened, which Windows does not allow)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def report(writers: Iterable[TokenWriter], started: float) -> None:
    """What was written, one line a file, and the speed since `started` (time.monotonic())."""
    total = 0
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    for w in writers:
        total += w.n_tokens
        print(
            f"{w.path}: {w.n_docs:,} documents, {w.n_tokens:,} tokens, {w.n_bytes:,} bytes, "
            f"longest document {w.longest:,} tokens"
        )
    seconds = time.monotonic() - started
    print(f"{seconds:.1f} s, {total / seconds:,.0f} tokens/s")
