"""The token file, the tokenizers, the loader against a naive stream of Python lists, the prepare scripts."""

import gzip
import hashlib
import json
import os
import random
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data
import data.hf.prepare as hf
import data.passkey.prepare as passkey
import data.pysrc.prepare as pysrc
import data.text.prepare as text

BYTES = data.get_tokenizer("bytes")
EOS = 256


@pytest.fixture(scope="module", autouse=True)
def no_fsync():
    """Hundreds of small files are written here; waiting for the disk would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


def write(path, docs, masks=None):
    with data.TokenWriter(path, tokenizer=BYTES, source="test", labels=masks is not None) as writer:
        for i, doc in enumerate(docs):
            writer.add(doc, masks[i] if masks else None)
    return data.TokenFile(path)


def documents_of(file):
    return [file.tokens[a:b].tolist() for a, b in zip(file.offsets[:-1], file.offsets[1:], strict=True)]


def texts_of(path):
    return [BYTES.decode(doc) for doc in documents_of(data.TokenFile(path))]


def random_docs(lengths, seed=0):
    """Documents whose tokens tell them apart."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(n)] for n in lengths]


def naive_stream(stream, docs, masks, count):
    """The first `count` tokens, labels and document starts, token by token; masks None: no label mask."""
    tokens, answers, starts = [], [], []
    epoch = 0
    while len(tokens) <= count:
        for d in stream._epoch(epoch)[0].tolist():
            begin = len(tokens)
            tokens += docs[d] + [EOS]
            answers += (masks[d] + [0]) if masks else [1] * (len(docs[d]) + 1)
            while len(tokens) % stream.block_size:
                tokens.append(EOS)
                answers.append(0)
            starts += [begin] * (len(tokens) - begin)
        epoch += 1
    labels = []
    for i in range(count):
        labels.append(tokens[i + 1] if tokens[i] != EOS and answers[i + 1] else -100)
    return tokens[:count], labels, starts[:count]


# --- stream and loader --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    block=st.sampled_from([1, 2, 4, 8, 16]),
    masked=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 1000),
    places=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=5),
)
def test_read_equals_naive_stream(lengths, block, masked, shuffle, seed, places):
    docs = random_docs(lengths, seed)
    rng = random.Random(seed)
    masks = [[rng.randrange(2) for _ in doc] for doc in docs]
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder, "a.bin"), docs, masks if masked else None)
        stream = data.Stream(file, seed=seed, block_size=block, shuffle=shuffle)
        assert stream.epoch_tokens == sum(-(-(n + 1) // block) * block for n in lengths)
        total = max(start + count for start, count in places) * block
        tokens, labels, starts = naive_stream(stream, docs, masks if masked else None, total)
        for start, count in places:
            start, count = start * block, count * block
            got_tokens, got_labels, got_starts = stream.read(start, count)
            assert got_tokens.dtype == got_labels.dtype == got_starts.dtype == np.int64
            assert got_tokens.tolist() == tokens[start : start + count]
            assert got_labels.tolist() == labels[start : start + count]
            assert got_starts.tolist() == starts[start : start + count : block]


def test_label_mask_leaves_answers_only(tmp_path):
    file = write(tmp_path / "a.bin", [[1, 2, 3, 4, 5], [6, 7]], [[0, 0, 1, 1, 0], [0, 1]])
    stream = data.Stream(file, seed=0, block_size=4, shuffle=False)
    tokens, labels, starts = stream.read(0, 12)
    assert tokens.tolist() == [1, 2, 3, 4, 5, EOS, EOS, EOS, 6, 7, EOS, EOS]
    assert labels.tolist() == [-100, 3, 4, -100, -100, -100, -100, -100, 7, -100, -100, -100]
    assert starts.tolist() == [0, 0, 8]
    assert data.Loader(stream, tokens_per_step=12).step(0, 4, True).n_labels == 3


def test_eos_that_ends_a_document_is_a_label_and_eos_has_none(tmp_path):
    stream = data.Stream(write(tmp_path / "a.bin", [[1, 2, 3], [4]]), seed=0, block_size=4, shuffle=False)
    tokens, labels, _ = stream.read(0, 8)
    assert tokens.tolist() == [1, 2, 3, EOS, 4, EOS, EOS, EOS]
    assert labels.tolist() == [2, 3, EOS, -100, EOS, -100, -100, -100]


def test_an_epoch_has_each_token_once_and_the_next_another_order(tmp_path):
    docs = random_docs(range(1, 60))
    stream = data.Stream(write(tmp_path / "a.bin", docs), seed=3, block_size=8)
    orders = []
    for epoch in range(3):
        tokens, _, starts = stream.read(epoch * stream.epoch_tokens, stream.epoch_tokens)
        begins = np.unique(starts) - epoch * stream.epoch_tokens
        found = [[t for t in part.tolist() if t != EOS] for part in np.split(tokens, begins[1:])]
        assert sorted(found) == sorted(docs)
        orders.append(found)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    again = data.Stream(stream.file, seed=3, block_size=8)
    assert again.read(stream.epoch_tokens, 64)[0].tolist() == stream.read(stream.epoch_tokens, 64)[0].tolist()
    other = data.Stream(stream.file, seed=4, block_size=8)
    assert other.read(0, 256)[0].tolist() != stream.read(0, 256)[0].tolist()


def test_shuffle_is_a_permutation_that_moves_everything_everywhere():
    places = np.array([np.argsort(data._shuffled(8, 0, epoch)) for epoch in range(800)])  # (epochs, 8)
    for document in range(8):
        counts = np.bincount(places[:, document], minlength=8)
        assert counts.sum() == 800 and counts.min() > 60 and counts.max() < 140


@pytest.mark.parametrize("block", [4, 8])
def test_a_step_is_the_same_however_it_is_cut(tmp_path, block):
    docs = random_docs([random.Random(1).randrange(1, 70) for _ in range(9)] + [1, 3, 4, 7, 8, 130])
    stream = data.Stream(write(tmp_path / "a.bin", docs), seed=5, block_size=block)
    loader = data.Loader(stream, tokens_per_step=128)
    n_steps = 3 * stream.epoch_tokens // 128
    tokens, labels, starts = naive_stream(stream, docs, None, n_steps * 128)
    for step in random.Random(0).sample(range(n_steps), n_steps):  # random access
        here = slice(step * 128, (step + 1) * 128)
        for seq_len in (block, 16, 32, 128):
            for world_size in (1, 2, 4):
                if 128 // seq_len % world_size:
                    continue
                for document_mask in (True, False):
                    cuts = [
                        loader.step(step, seq_len, document_mask, r, world_size) for r in range(world_size)
                    ]
                    assert np.concatenate([b.tokens.numpy() for b in cuts]).ravel().tolist() == tokens[here]
                    assert np.concatenate([b.labels.numpy() for b in cuts]).ravel().tolist() == labels[here]
                    for b in cuts:
                        assert b.tokens.shape == b.labels.shape == (128 // seq_len // world_size, seq_len)
                        assert b.n_labels == sum(label != -100 for label in labels[here])
                        assert b.n_pad == tokens[here].count(EOS)
                        assert b.n_tokens == 128
                    if not document_mask:
                        assert all(b.doc_start_block is None for b in cuts)
                        continue
                    assert {str(b.doc_start_block.dtype) for b in cuts} == {"torch.int32"}
                    got = np.concatenate([b.doc_start_block.numpy() for b in cuts])
                    for s in range(128 // seq_len):
                        begin = step * 128 + s * seq_len
                        for i in range(seq_len // block):
                            assert got[s, i] == max(0, starts[begin + i * block] - begin) // block


def test_documents_longer_than_several_steps(tmp_path):
    docs = random_docs([1000, 3])
    loader = data.Loader(
        data.Stream(write(tmp_path / "a.bin", docs), seed=0, block_size=8, shuffle=False), tokens_per_step=64
    )
    got = [t for step in range(16) for t in loader.step(step, 32, True).tokens.flatten().tolist()]
    assert got[:1000] == docs[0] and got[1000:1008] == [EOS] * 8 and got[1008:1011] == docs[1]
    assert loader.step(1, 32, True).doc_start_block.tolist() == [[0, 0, 0, 0]] * 2
    assert loader.step(15, 64, True).doc_start_block.tolist() == [[0, 0, 0, 0, 0, 0, 6, 7]]


def test_loader_errors_say_what_works(tmp_path):
    stream = data.Stream(write(tmp_path / "a.bin", [[1, 2, 3]]), seed=0, block_size=8)
    loader = data.Loader(stream, tokens_per_step=96)
    for seq_len in (12, 64, 0, 192):
        with pytest.raises(ValueError, match=r"seq_len.*possible: 8, 16, 24, 32, 48, 96"):
            loader.step(0, seq_len, True)
    with pytest.raises(ValueError, match=r"world_size \(4\).*possible: 8, 24"):
        loader.step(0, 32, True, 0, 4)
    with pytest.raises(ValueError, match="none does"):
        loader.step(0, 96, True, 0, 5)
    for step, rank, world_size in ((-1, 0, 1), (0, 2, 2), (0, -1, 2), (0, 0, 0)):
        with pytest.raises(ValueError, match="rank"):
            loader.step(step, 32, True, rank, world_size)
    with pytest.raises(ValueError, match="tokens_per_step is 100.*96"):
        data.Loader(stream, tokens_per_step=100)
    with pytest.raises(ValueError, match="block_size"):
        data.Stream(stream.file, seed=0, block_size=0)
    for start, count in ((4, 8), (0, 12), (-8, 8), (0, 0)):
        with pytest.raises(ValueError, match="multiples of block_size"):
            stream.read(start, count)


# --- the file -----------------------------------------------------------------------------------------------


def test_file_round_trip(tmp_path):
    docs = random_docs([5, 1, 17])
    masks = [[i % 2 for i in range(len(doc))] for doc in docs]
    plain = write(tmp_path / "sub" / "plain.bin", docs)
    masked = write(
        tmp_path / "masked.bin", [docs[0], [], *docs[1:]], [masks[0], [], *masks[1:]]
    )  # [] is skipped
    for file in (plain, masked):
        assert documents_of(file) == docs and len(file) == 23 and file.n_docs == 3 and file.n_bytes == 23
        assert file.tokens.dtype == np.uint16 and file.offsets.dtype == np.int64
        assert (file.vocab_size, file.eos, file.tokenizer, file.source) == (257, 256, "bytes", "test")
        assert file.token_bytes.dtype == np.int32 and file.token_bytes.tolist() == [1] * 256 + [0]
        assert file.hash == hashlib.sha256(file.path.read_bytes()[data.HEADER_BYTES :]).hexdigest()
        file.verify()
    assert plain.label_mask is None and masked.label_mask.tolist() == sum(masks, [])
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["masked.bin", "plain.bin", "sub"]


def test_a_large_vocabulary_takes_uint32(tmp_path):
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {struct.pack(">I", i): i for i in range(256, 70_000)}
    tokenizer = data.tiktoken.Encoding(
        "large", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 70_000}
    )
    with data.TokenWriter(tmp_path / "a.bin", tokenizer=tokenizer, source="") as writer:
        writer.add([1, 69_999, 2])
    file = data.TokenFile(tmp_path / "a.bin")
    assert file.tokens.dtype == np.uint32 and file.tokens.tolist() == [1, 69_999, 2] and file.n_bytes == 6


def test_writer_is_atomic(tmp_path):
    path = tmp_path / "train.bin"
    with pytest.raises(KeyError), data.TokenWriter(path, tokenizer=BYTES, source="", labels=True) as writer:
        writer.add([1, 2], [0, 1])
        raise KeyError
    assert not list(tmp_path.iterdir())
    old = write(path, [[7]]).hash
    with pytest.raises(KeyError), data.TokenWriter(path, tokenizer=BYTES, source="") as writer:
        writer.add([1, 2])
        raise KeyError
    killed = data.TokenWriter(path, tokenizer=BYTES, source="")  # never closed, as by a kill
    killed.add([1, 2, 3])
    killed._file.flush()
    with pytest.raises(ValueError, match="no token file"):
        data.TokenFile(killed.tmp)
    assert data.TokenFile(path).hash == old
    write(path, [[1, 2, 3, 4]])  # over the left-over
    assert [p.name for p in tmp_path.iterdir()] == ["train.bin"]
    with pytest.raises(ValueError, match="no document"), data.TokenWriter(path, tokenizer=BYTES, source=""):
        pass
    assert documents_of(data.TokenFile(path)) == [[1, 2, 3, 4]]


def test_writer_refuses_what_does_not_fit(tmp_path):
    with data.TokenWriter(tmp_path / "a.bin", tokenizer=BYTES, source="") as writer:
        for tokens, message in (
            ([1, 257], "1..257"),
            ([-1], "-1"),
            ([1, EOS], "EOS"),
            ([[1]], "one dimension"),
            ([0.5], "integers"),
        ):
            with pytest.raises(ValueError, match=message):
                writer.add(tokens)
        with pytest.raises(ValueError, match="mask"):
            writer.add([1], [1])
        writer.add([1])
    with data.TokenWriter(tmp_path / "b.bin", tokenizer=BYTES, source="", labels=True) as writer:
        for mask in (None, [1], [1, 2], [1, -1]):
            with pytest.raises(ValueError, match="mask"):
                writer.add([1, 2], mask)
        writer.add([1, 2], [True, False])
    with (
        pytest.raises(ValueError, match="source"),
        data.TokenWriter(tmp_path / "c.bin", tokenizer=BYTES, source="x" * 5000) as writer,
    ):
        writer.add([1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "b.bin"]


def change_header(raw, **changes):
    """The file with other fields in its header, the checksum right."""
    magic, version, length, _ = struct.unpack_from("<8sIII", raw)
    meta = json.loads(raw[20 : 20 + length]) | changes
    encoded = json.dumps({k: v for k, v in meta.items() if v is not ...}).encode()
    head = struct.pack("<8sIII", magic, version, len(encoded), zlib.crc32(encoded)) + encoded
    return head.ljust(data.HEADER_BYTES, b"\0") + raw[data.HEADER_BYTES :]


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    write(path, random_docs([100, 20]), [[1] * 100, [0] * 20])
    raw = path.read_bytes()
    length = struct.unpack_from("<8sIII", raw)[2]

    def refused(content, message):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"(?s){path.name}.*{message}.*prepare.py"):
            data.TokenFile(path)

    refused(b"", "no token file")
    refused(b"PK" + raw[2:], "no token file")
    refused(raw[:100], "cut short")
    refused(raw[:8] + struct.pack("<I", 2) + raw[12:], "version 2, this code reads version 1")
    refused(raw[:8] + struct.pack(">I", 1) + raw[12:], "big-endian")
    for at in (*range(12, 20), 20, 20 + length // 2, 19 + length):
        refused(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :], "damaged")
    for n in (1, 50, len(raw) - data.HEADER_BYTES):
        refused(raw[:-n], "header asks for")
    refused(raw + b"\0", "header asks for")
    for name in data._META:
        refused(change_header(raw, **{name: ...}), name)
        refused(change_header(raw, **{name: []}), name)
    for name, value in dict(n_tokens=0, n_docs=0, n_bytes=-1, vocab_size=0, eos=-1).items():
        refused(change_header(raw, **{name: value}), f"{name} = {value}")
    refused(change_header(raw, eos=257), "eos = 257")
    refused(change_header(raw, dtype="int16"), "'int16'")
    for changes in (dict(dtype="uint32"), dict(n_tokens=119), dict(n_docs=3), dict(vocab_size=300)):
        refused(change_header(raw, **changes), "header asks for")
    refused(change_header(raw, label_mask=False), "header asks for")
    at = data.HEADER_BYTES + 240  # the offsets
    for i in range(3):
        refused(raw[: at + 8 * i] + struct.pack("<q", 1000) + raw[at + 8 * i + 8 :], "offsets")

    path.write_bytes(raw[: data.HEADER_BYTES] + b"\7" + raw[data.HEADER_BYTES + 1 :])
    with pytest.raises(ValueError, match="sha256"):
        data.TokenFile(path).verify()
    path.write_bytes(raw[: data.HEADER_BYTES] + struct.pack("<H", 257) + raw[data.HEADER_BYTES + 2 :])
    stream = data.Stream(data.TokenFile(path), seed=0, block_size=8, shuffle=False)
    with pytest.raises(ValueError, match=f"{path.name}: it holds token 257 and a vocabulary of 257"):
        stream.read(0, 8)
    stream.read(8, 8)
    path.unlink()
    with pytest.raises(ValueError, match="does not exist.*prepare.py"):
        data.TokenFile(path)


@pytest.mark.parametrize("script", [pysrc, text, passkey, hf])
def test_verify_from_the_shell(tmp_path, monkeypatch, capsys, script):
    """Zeros in the middle of the tokens are tokens too: the hash alone tells."""
    for name in ("train", "val"):
        write(tmp_path / f"{name}.bin", [[1] * 5000])
    argv = ["--verify", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        script.main(argv)
    assert not stop.value.code
    assert f"{tmp_path / 'val.bin'}: whole, 1 documents, 5,000 tokens, sha256" in capsys.readouterr().out
    raw = bytearray((tmp_path / "val.bin").read_bytes())
    raw[6000:11000] = bytes(5000)
    (tmp_path / "val.bin").write_bytes(raw)
    data.Stream(data.TokenFile(tmp_path / "val.bin"), seed=0, block_size=8).read(0, 5000)
    with pytest.raises(ValueError, match="val.bin: its content has sha256 .*: run the prepare.py"):
        script.main(argv)
    with pytest.raises(ValueError, match="there is no data set"):
        script.main(["--verify", str(tmp_path / "other")])


def test_find_dataset(tmp_path, monkeypatch):
    write(tmp_path / "mine" / "train.bin", [[1]])
    assert data.find_dataset(tmp_path / "mine") == tmp_path / "mine"
    monkeypatch.chdir(tmp_path)
    assert data.find_dataset("mine").samefile(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"'nothing'.*pysrc.*python data/pysrc/prepare.py"):
        data.find_dataset("nothing")
    if not list((Path(data.__file__).parent / "text").glob("*.bin")):
        with pytest.raises(ValueError, match=r"run `python data/text/prepare.py`"):
            data.find_dataset("text")


# --- tokenizers ---------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_bytes_round_trip(string):
    tokens = data.encode(BYTES, string)
    assert bytes(tokens.astype(np.uint8)) == string.encode() and tokens.max(initial=0) < 256
    assert tokens.tolist() == BYTES.encode_ordinary(string)
    assert BYTES.decode(tokens.tolist()) == string


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 256)))
def test_bytes_decodes_any_ids(ids):
    assert isinstance(BYTES.decode(ids), str)


def test_bytes_special_text_surrogates_and_long_runs():
    assert BYTES.n_vocab == 257 and BYTES.eot_token == EOS and BYTES.name == "bytes"
    assert data.encode(BYTES, "<|endoftext|>").tolist() == list(b"<|endoftext|>")
    assert BYTES.decode(data.encode(BYTES, "a\ud800b").tolist()) == "a\ufffdb"
    for string in (" " * 600_000, "\n" * 300_000 + "x", "漢字😀é" * 100_000):
        assert bytes(data.encode(BYTES, string).astype(np.uint8)) == string.encode()


def gpt2_cached():
    url = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    folder = Path(folder or Path(tempfile.gettempdir(), "data-gym-cache"))
    keys = (hashlib.sha1((url + name).encode()).hexdigest() for name in ("vocab.bpe", "encoder.json"))
    return all((folder / key).exists() for key in keys)


@pytest.mark.skipif(not gpt2_cached(), reason="the gpt2 vocabulary is not in tiktoken's cache")
def test_gpt2(tmp_path):
    gpt2 = data.get_tokenizer("gpt2")
    assert gpt2.n_vocab == 50257 and gpt2.eot_token == 50256
    assert data.encode(gpt2, "hello world").tolist() == [31373, 995]
    string = "def f(x):\n    return 'é漢😀' <|endoftext|>\n" + " " * 2_000_000
    tokens = data.encode(gpt2, string)
    assert gpt2.decode(tokens.tolist()) == string
    with data.TokenWriter(tmp_path / "a.bin", tokenizer=gpt2, source="") as writer:
        writer.add(tokens)
    file = data.TokenFile(tmp_path / "a.bin")
    assert file.tokens.dtype == np.uint16 and file.token_bytes[50256] == 0
    assert file.n_bytes == file.token_bytes[file.tokens].sum() == len(string.encode())


def test_gpt2_out_of_reach(monkeypatch):
    def fail(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(data.tiktoken, "get_encoding", fail)
    with pytest.raises(ValueError, match="could not be downloaded.*TIKTOKEN_CACHE_DIR.*'bytes'") as caught:
        data.get_tokenizer("gpt2")
    for name in ("vocab.bpe", "encoder.json"):  # how a file that came by other ways must be called
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        assert f"{address}, named {hashlib.sha1(address.encode()).hexdigest()}" in str(caught.value)
    with pytest.raises(ValueError, match="'gpt3'; allowed are 'gpt2' and 'bytes'"):
        data.get_tokenizer("gpt3")


@pytest.mark.parametrize("workers", [1, 3])
def test_encode_many_keeps_order(workers):
    rng = random.Random(0)
    items = [(i, "é" * rng.choice([0, 1, 100, 400_000])) for i in range(40)]
    got = list(data.encode_many(BYTES, iter(items), workers))
    assert [(i, len(tokens)) for i, tokens in got] == [(i, 2 * len(string)) for i, string in items]
    with pytest.raises(ValueError, match="workers is 0"):
        list(data.encode_many(BYTES, iter(items), 0))


# --- the prepare scripts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [pysrc, text, hf, passkey])
def test_help(script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert f"python data/{Path(script.__file__).parent.name}/prepare.py" in shown and "default" in shown


def test_pysrc(tmp_path, capsys, monkeypatch):
    paths = pysrc.sysconfig.get_paths()  # the standard library alone: site-packages may be large
    monkeypatch.setattr(
        pysrc.sysconfig, "get_paths", lambda: paths | dict.fromkeys(("purelib", "platlib"), tmp_path)
    )
    run = ["--max_bytes", "400_000", "--out"]
    pysrc.main([*run, str(tmp_path / "a")])
    pysrc.main([*run, str(tmp_path / "b"), "--workers", "1"])
    train, val = (data.TokenFile(tmp_path / "a" / name) for name in ("train.bin", "val.bin"))
    assert train.hash == data.TokenFile(tmp_path / "b" / "train.bin").hash
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    packages = manifest["packages"]
    for split, file in (("train", train), ("val", val)):
        file.verify()
        names = [p["name"] for p in packages if p["split"] == split]
        documents = texts_of(file.path)
        assert len(names) == len(documents) == file.n_docs > 0
        for name, document in zip(names, documents, strict=True):
            assert document.startswith(f"# {name}")
    assert 200_000 < sum(p["bytes"] for p in packages) <= 400_000 < 2 * (len(train) + len(val))
    assert "longest document" in capsys.readouterr().out
    with pytest.raises(ValueError, match="max_bytes is 10"):
        pysrc.main(["--max_bytes", "10", "--out", str(tmp_path / "c")])
    assert not (tmp_path / "c").exists()
    # Cut documents hold the same tokens in the same order, whole packages after one another.
    pysrc.main([*run, str(tmp_path / "d"), "--max_document", "1000"])
    cut = data.TokenFile(tmp_path / "d" / "train.bin")
    sizes = np.diff(cut.offsets)
    assert sizes.max() == 1000 and cut.n_docs == sum(-(-n // 1000) for n in np.diff(train.offsets).tolist())
    assert np.array_equal(cut.tokens, train.tokens)
    with pytest.raises(ValueError, match="max_document is -1"):
        pysrc.main([*run, str(tmp_path / "e"), "--max_document=-1"])


def test_pysrc_groups_drops_and_splits(tmp_path, monkeypatch):
    lib, site = tmp_path / "lib", tmp_path / "lib" / "site-packages"
    sources = {f"lib/m{i}.py": f"x = {i}" for i in range(40)}
    sources |= {
        "lib/pkg/b.py": "b = 1\n",
        "lib/pkg/a/__init__.py": "",
        "lib/pkg/a/c.py": "c = 1\r\n",
        "lib/pkg/notes.txt": "no",
        "lib/site-packages/ext/copy.py": "b = 1\n",
        "lib/site-packages/ext/own.py": "own = 'é'\n",
    }
    for name, content in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content.encode())
    (lib / "pkg" / "latin.py").write_bytes(b"x = '\xe9'\n")
    paths = dict(stdlib=str(lib), purelib=str(site), platlib=str(site))
    monkeypatch.setattr(pysrc.sysconfig, "get_paths", lambda: paths)
    pysrc.main(["--out", str(tmp_path / "out"), "--max_bytes", "0", "--val_share", "0.3"])
    train, val = (texts_of(tmp_path / "out" / name) for name in ("train.bin", "val.bin"))
    documents = train + val
    assert len(documents) == 42 and 3 < len(val) < 25
    assert "# pkg/a/__init__.py\n\n# pkg/a/c.py\nc = 1\r\n# pkg/b.py\nb = 1\n" in documents
    assert "# ext/own.py\nown = 'é'\n" in documents
    assert "# m7.py\nx = 7\n" in documents
    assert documents[-1] != "" and sorted(documents) == sorted(set(documents))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["dropped"] == {"duplicate": 1, "not UTF-8": 1}
    # The same packages are on the same side when others are gone.
    sides = {p["name"]: p["split"] for p in manifest["packages"]}
    for i in range(20):
        (lib / f"m{i}.py").unlink()
    pysrc.main(["--out", str(tmp_path / "out"), "--max_bytes", "0", "--val_share", "0.3"])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert len(manifest["packages"]) == 22
    assert all(sides[p["name"]] == p["split"] for p in manifest["packages"])


def test_text(tmp_path, capsys):
    source = tmp_path / "in"
    (source / "deep" / ".git").mkdir(parents=True)
    expected = [f"file {i} é\r\nline\n" for i in range(20)]
    for i, content in enumerate(expected):
        (source / "deep" / f"{i}.txt").write_bytes(content.encode())
    (source / "deep" / ".git" / "config").write_text("hidden")
    (source / "bad.txt").write_bytes(b"\xff\xfe\xff")
    rows = [f"row {i}" for i in range(20)]
    (source / "a.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in rows[:10]) + "\n")
    with gzip.open(source / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"body": row}) + "\n" for row in rows[10:])
    run = ["--input", str(source), "--val_share", "0.3", "--field", "body", "--out", str(tmp_path / "out")]
    text.main(run)
    train, val = texts_of(tmp_path / "out" / "train.bin"), texts_of(tmp_path / "out" / "val.bin")
    assert sorted(train + val) == sorted(expected + rows) and len(train) > len(val) > 0
    assert f"skipped files that are no UTF-8 text: 1 ({source / 'bad.txt'})" in capsys.readouterr().out
    text.main([*run, "--glob", "*.jsonl"])
    assert len(texts_of(tmp_path / "out" / "train.bin") + texts_of(tmp_path / "out" / "val.bin")) == 10
    text.main([*run, "--glob", "*.jsonl", "--seed", "1"])
    assert texts_of(tmp_path / "out" / "val.bin") != [row for row in val if row in rows[:10]]

    with pytest.raises(
        ValueError, match=r"rows in the input: 20 .*a.jsonl line 1 has no text in 'text' .*body"
    ):
        text.main(["--input", str(source), "--out", str(tmp_path / "out2")])
    with pytest.raises(ValueError, match="nowhere does not exist"):
        text.main(["--input", "nowhere"])
    with pytest.raises(ValueError, match=r"no file that matches glob \*.csv"):
        text.main(["--input", str(source), "--glob", "*.csv"])
    with pytest.raises(SystemExit):
        text.main(["--input", str(source), "--val_share", "1"])
    assert not list((tmp_path / "out2").glob("*"))


def test_text_separator(tmp_path):
    (tmp_path / "stories.txt").write_text("".join(f"story {i}\n<|endoftext|>\n" for i in range(30)))
    run = ["--input", str(tmp_path / "stories.txt"), "--val_share", "0.3", "--out", str(tmp_path)]
    text.main([*run, "--separator", "<|endoftext|>"])
    found = texts_of(tmp_path / "train.bin") + texts_of(tmp_path / "val.bin")
    assert sorted(found) == sorted(f"story {i}" for i in range(30))


def test_text_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [f"row {i}" for i in range(600)]
    pyarrow.parquet.write_table(pa.table({"id": list(range(600)), "text": rows}), tmp_path / "a.parquet")
    run = ["--input", str(tmp_path / "a.parquet"), "--out", str(tmp_path)]
    text.main(run)
    assert sorted(texts_of(tmp_path / "train.bin") + texts_of(tmp_path / "val.bin")) == sorted(rows)
    with pytest.raises(ValueError, match=r"no column 'body' \(--field\), but \['id', 'text'\]"):
        text.main([*run, "--field", "body"])


ROWS = [{"text": f"file {i}", "repo": f"r{i // 3}"} for i in range(200)]
GROUPS = ["\n\n".join(r["text"] for r in ROWS[i : i + 3]) for i in range(0, 200, 3)]


@pytest.fixture
def hf_run(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = ["--path", "json", "--data_files", str(tmp_path / "rows.jsonl")]
    return [*files, "--out", str(tmp_path / "out"), "--val_share", "0.2"]


def hf_result(tmp_path):
    train, val = texts_of(tmp_path / "out" / "train.bin"), texts_of(tmp_path / "out" / "val.bin")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["train.bin", "val.bin"]
    return train, val


def test_hf_rows_and_groups(tmp_path, hf_run, capsys):
    hf.main(hf_run)
    train, val = hf_result(tmp_path)
    assert sorted(train + val) == sorted(row["text"] for row in ROWS) and len(train) > len(val) > 10
    hf.main([*hf_run, "--group_by", "repo", "--shard_tokens", "200"])
    train, val = hf_result(tmp_path)
    assert sorted(train + val) == sorted(GROUPS) and len(train) > len(val) > 3
    assert train == [group for group in GROUPS if group in train]  # in order, across shards
    assert "sort the data set" not in capsys.readouterr().out
    hf.main([*hf_run, "--max_tokens", "300"])
    assert 300 <= sum(len(doc) for split in hf_result(tmp_path) for doc in split) < 310


def test_hf_scattered_groups_are_counted(tmp_path, hf_run, capsys):
    rows = [{"text": f"t{i}", "repo": i % 50} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hf.main([*hf_run, "--group_by", "repo"])
    assert sum(map(len, hf_result(tmp_path))) == 100
    assert "50 documents belong to a 'repo' that came before" in capsys.readouterr().out


def test_hf_parquet_and_errors(tmp_path, hf_run):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = pa.table({"content": [row["text"] for row in ROWS] + [None]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    parquet = ["--path", "parquet", "--data_files", str(tmp_path / "rows.parquet"), *hf_run[4:]]
    hf.main([*parquet, "--field", "content"])
    assert sum(map(len, hf_result(tmp_path))) == 200
    with pytest.raises(ValueError, match=r"row 0 has no 'text'.*\['content'\]"):
        hf.main(parquet)


def test_hf_continues_after_an_interruption(tmp_path, hf_run, monkeypatch, capsys):
    run = [*hf_run, "--group_by", "repo", "--shard_tokens", "300", "--workers", "1"]
    hf.main(run)
    whole = hf_result(tmp_path)
    encode_many, seen = data.encode_many, []

    def killed(tokenizer, items, workers):
        for n, item in enumerate(encode_many(tokenizer, items, workers)):
            if n == 40:
                raise KeyboardInterrupt
            yield item

    def watched(tokenizer, items, workers):
        for item in encode_many(tokenizer, items, workers):
            seen.append(item)
            yield item

    for file in (tmp_path / "out").iterdir():
        file.unlink()
    monkeypatch.setattr(data, "encode_many", killed)
    with pytest.raises(KeyboardInterrupt):
        hf.main(run)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["shards"]
    (tmp_path / "out" / "shards" / "00003-val.bin").write_bytes(b"left over")
    monkeypatch.setattr(data, "encode_many", watched)
    with pytest.raises(ValueError, match="other arguments"):
        hf.main([*run, "--seed", "1"])
    hf.main(run)
    assert hf_result(tmp_path) == whole and 0 < len(seen) < len(GROUPS) - 20
    assert "continuing at row" in capsys.readouterr().out


@pytest.mark.parametrize("spread", [[], ["--spread"]])
def test_passkey(tmp_path, spread):
    sizes = ["--keys", "5", "--questions", "3", "--documents", "6", "--val_documents", "2", *spread]
    run = ["--length", "1024", "1536", "--haystack", "none", *sizes, "--out"]
    passkey.main([*run, str(tmp_path / "a")])
    passkey.main([*run, str(tmp_path / "b")])
    seen = set()
    for split, count in (("train", 6), ("val", 2)):
        file = data.TokenFile(tmp_path / "a" / f"{split}.bin")
        assert file.hash == data.TokenFile(tmp_path / "b" / f"{split}.bin").hash
        assert np.diff(file.offsets).tolist() == [1023] * count + [1535] * count
        for lo, hi in zip(file.offsets[:-1], file.offsets[1:], strict=True):
            tokens, mask = file.tokens[lo:hi], file.label_mask[lo:hi]
            document = BYTES.decode(tokens.tolist())
            seen.add(document)
            edges = np.flatnonzero(np.diff(np.pad(mask.astype(int), 1))).reshape(-1, 2)
            assert len(edges) == 3 and mask.sum() == 3 * len(" 12345")
            names = []
            for begin, end in edges:
                answer = BYTES.decode(tokens[begin:end].tolist())
                before = BYTES.decode(tokens[:begin].tolist())
                name = before.rpartition("What is the passkey of ")[2].removesuffix("?")
                key = f"The passkey of {name} is{answer}."
                assert document.count(key) == 1 and key in before  # asked after it was told
                names.append(name)
            assert len(set(names)) == 3 and document.count("The passkey of") == 5
            if not spread:
                assert document[edges[0][0] :].count("The passkey of") == 0
    assert len(seen) == 16  # no document twice
    stream = data.Stream(file, seed=0, block_size=128)
    batch = data.Loader(stream, tokens_per_step=stream.epoch_tokens).step(0, stream.epoch_tokens, True)
    assert batch.n_labels == 4 * 3 * 6 and batch.n_pad == 4


def test_passkey_haystack(tmp_path):
    for split, letter in (("train", "t"), ("val", "v")):
        write(tmp_path / "hay" / f"{split}.bin", [list(letter.encode() * 700)])
    run = ["--length", "1024", "--keys", "2", "--questions", "2", "--documents", "2", "--val_documents", "2"]
    run += ["--haystack", str(tmp_path / "hay"), "--out", str(tmp_path / "out")]
    passkey.main(run)
    for split, letter in (("train", "t"), ("val", "v")):
        for document in texts_of(tmp_path / "out" / f"{split}.bin"):
            assert document.count(letter) > 800
    for change, message in (
        (["--length", "100"], "length is 100"),
        (["--questions", "3"], "questions is 3, keys 2"),
        (["--documents", "0"], "documents is 0"),
        (["--haystack", "nothing"], "no data set 'nothing'"),
    ):
        with pytest.raises(ValueError, match=message):
            passkey.main([*run, *change])
