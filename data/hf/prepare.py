"""python data/hf/prepare.py --path HuggingFaceFW/fineweb-edu --name sample-10BT --max_tokens 1000000000

Writes train.bin and val.bin from any Hugging Face data set, streamed: only its tokens are kept on disk. Local
files need no network: `--path json --data_files a.jsonl b.jsonl`, or `--path parquet --data_files x.parquet`.

A row is a document. With --group_by COLUMN consecutive rows with the same value in that column become one
document, joined by an empty line: a repository of its files, a book of its pages. The rows of a group must
follow each other in the data set, since a stream cannot be sorted; a group that comes back later starts
another document, and the output says how many did. Sort such a data set by the column first, and save it as
parquet.

Finished parts lie in the folder `shards` until all is done. A run that was stopped continues behind the last
of them when it is started again with the same arguments; the rows before are read and skipped. A document is
validation if the hash of its text says so.
"""

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import data

SPLITS = ("train", "val")


@dataclass
class Document:
    text: str
    group: str
    next_row: int  # the row behind the last one of this document


def documents(rows: Iterable[dict], field: str, group_by: str | None, first_row: int) -> Iterator[Document]:
    """The documents of `rows`, whose first is row first_row of the data set. An absent text is empty."""
    texts: list[str] = []
    group, row = "", first_row
    for value in rows:
        for column in (field, group_by):
            if column is not None and column not in value:
                raise ValueError(f"row {row} has no {column!r} (--field, --group_by), but {sorted(value)}")
        text = value[field] or ""
        if not isinstance(text, str):
            raise ValueError(f"row {row} has {type(text).__name__} in {field!r} (--field); it must be text")
        this = str(value[group_by]) if group_by else str(row)
        if texts and this != group:
            yield Document("\n\n".join(texts), group, row)
            texts = []
        texts.append(text)
        group, row = this, row + 1
    if texts:
        yield Document("\n\n".join(texts), group, row)


def read_rows(args: argparse.Namespace, first_row: int) -> Iterator[dict]:
    """The data set from first_row on."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError("data/hf needs datasets: pip install -e .[data]") from error
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # damaged files: said below
    try:
        yield from datasets.load_dataset(
            args.path, args.name, split=args.split, data_files=args.data_files, streaming=True
        ).skip(first_row)
    except (ValueError, OSError) as error:  # pyarrow's on damaged rows are ValueErrors
        files = f" {' '.join(args.data_files)}" if args.data_files else ""
        raise ValueError(
            f"data set {args.path}{files} cannot be read: {error}; see --path, --name, --split, --data_files "
            "and the network. Local files need none: --path json --data_files FILES"
        ) from error


def write_shards(args: argparse.Namespace, tokenizer: tiktoken.Encoding, source: str, shards: Path) -> int:
    """Encode what the finished shards lack; returns their number. Progress is in shards/progress.json."""
    run = {k: v for k, v in vars(args).items() if k not in ("out", "workers")}
    progress = {"run": run, "shards": 0, "next_row": 0, "tokens": 0, "done": False}
    state = shards / "progress.json"
    if state.exists():
        progress = json.loads(state.read_text())
        if progress["run"] != run:
            raise ValueError(
                f"{shards} holds parts of a run with other arguments, {progress['run']}: repeat those to "
                "continue it, or delete the folder to start over"
            )
        print(f"continuing at row {progress['next_row']:,} with {progress['tokens']:,} tokens", flush=True)
    if progress["done"]:
        return progress["shards"]

    found = documents(read_rows(args, progress["next_row"]), args.field, args.group_by, progress["next_row"])
    encoded = data.encode_many(tokenizer, ((doc, doc.text) for doc in found), args.workers)
    bar = data.Progress("tokens", args.max_tokens or None)
    bar.add(progress["tokens"])
    groups: set[int] = set()
    returned = 0
    while not progress["done"]:
        paths = {split: shards / f"{progress['shards']:05d}-{split}.bin" for split in SPLITS}
        for path in paths.values():  # left by a run that ended before it could count them
            path.unlink(missing_ok=True)
        writers = {s: data.TokenWriter(p, tokenizer=tokenizer, source=source) for s, p in paths.items()}
        try:
            for doc, tokens in encoded:
                split = "val" if data.unit_hash(doc.text, args.seed) < args.val_share else "train"
                writers[split].add(tokens)
                progress["next_row"] = doc.next_row
                progress["tokens"] += len(tokens)
                bar.add(len(tokens))
                if args.group_by:
                    returned += hash(doc.group) in groups
                    groups.add(hash(doc.group))
                if args.max_tokens and progress["tokens"] >= args.max_tokens:
                    progress["done"] = True
                    break
                if sum(w.n_tokens for w in writers.values()) >= args.shard_tokens:
                    break
            else:
                progress["done"] = True
            for writer in writers.values():
                if writer.n_docs:
                    writer.close()
        finally:
            for writer in writers.values():
                writer.abort()  # nothing to do for those that are closed
        progress["shards"] += 1
        data.write_json(state, progress)
    if returned:
        print(
            f"{returned:,} documents belong to a {args.group_by!r} that came before and ended (counted since "
            "this start): to have each in one document, sort the data set by that column first"
        )
    return progress["shards"]


def main(argv: list[str] | None = None) -> None:
    parser = data.prepare_parser(__file__, __doc__)
    data.add_split_options(parser, val_share=0.005)
    parser.add_argument("--path", required=True, help="data set, or json, parquet, text with --data_files")
    parser.add_argument("--name", help="its configuration")
    parser.add_argument("--split", default="train", help="its split; val.bin is taken out of this one too")
    parser.add_argument("--data_files", nargs="+", help="files of the data set, or local ones")
    parser.add_argument("--field", default="text", help="column with the text")
    parser.add_argument("--group_by", help="consecutive rows with the same value here are one document")
    parser.add_argument("--max_tokens", type=int, default=0, help="stop after this many tokens, 0: take all")
    parser.add_argument(
        "--shard_tokens", type=int, default=100_000_000, help="a stopped run repeats at most this"
    )
    args = parser.parse_args(argv)
    started = time.monotonic()
    tokenizer = data.get_tokenizer(args.tokenizer)
    source = " ".join(filter(None, (args.path, args.name, args.split)))[:200]
    shards = args.out / "shards"
    n_shards = write_shards(args, tokenizer, source, shards)
    with data.write_splits(args.out, tokenizer=tokenizer, source=source) as (train, val):
        for split, writer in zip(SPLITS, (train, val), strict=True):
            for path in sorted(shards.glob(f"*-{split}.bin"))[:n_shards]:
                part = data.TokenFile(path)
                for lo, hi in zip(part.offsets[:-1], part.offsets[1:], strict=True):
                    writer.add(part.tokens[lo:hi])
    shutil.rmtree(shards)
    data.report((train, val), started)


if __name__ == "__main__":
    data.run_script(main)
