"""python data/text/prepare.py --input FILE_OR_FOLDER ...

Writes train.bin and val.bin from text of your own. What a document is depends on a file's name:

    *.jsonl, *.jsonl.gz   a line, its text in --field
    *.parquet             a row, its text in the column --field (needs pyarrow)
    any other, *.gz too   the whole file, or its parts between --separator; files not in UTF-8 are skipped

A document is validation if the hash of its text says so, so that equal documents go to the same side. With
fewer than some dozens of documents choose --val_share and --seed so that both sides get some.
"""

import gzip
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import data


def find_files(inputs: list[Path], globs: list[str]) -> list[Path]:
    """The files named, and those in the folders named that match a pattern; ValueError if there are none."""

    def hidden(file: Path, folder: Path) -> bool:
        return any(part.startswith(".") for part in file.relative_to(folder).parts)

    files: set[Path] = set()
    for path in inputs:
        if path.is_file():
            files.add(path)
        elif path.is_dir():
            found = (f for pattern in globs for f in path.glob(pattern))
            files.update(f for f in found if f.is_file() and not hidden(f, path))
        else:
            raise ValueError(f"input {path} does not exist")
    if not files:
        raise ValueError(f"input holds no file that matches glob {' '.join(globs)}")
    return sorted(files)


def rows(path: Path, field: str) -> Iterator[tuple[str, dict]]:
    """(where, row) for each row of a jsonl or parquet file; a parquet row has just the one field."""
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ValueError("parquet files need pyarrow: pip install -e .[data]") from error
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise ValueError(f"{path} has no column {field!r} (--field), but {file.schema_arrow.names}")
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield f"{path} row {row}", {field: text}
                    row += 1
    else:
        with open_text(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield f"{path} line {number}", json.loads(line)
                    except json.JSONDecodeError as error:
                        raise ValueError(f"{path} line {number} is no JSON: {error}") from error


def open_text(path: Path):
    # newline="\n": line ends stay as they are in the file
    opener = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8", newline="\n")


def main(argv: list[str] | None = None) -> None:
    parser = data.prepare_parser(__file__, __doc__)
    data.add_split_options(parser, val_share=0.01)
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="files and folders")
    parser.add_argument(
        "--glob", nargs="+", default=["**/*"], help="which files of the folders (never hidden ones)"
    )
    parser.add_argument("--field", default="text", help="key or column with the text, in jsonl and parquet")
    parser.add_argument(
        "--separator", help="text that ends a document within a file, such as '<|endoftext|>'"
    )
    args = parser.parse_args(argv)
    started = time.monotonic()
    tokenizer = data.get_tokenizer(args.tokenizer)
    files = find_files(args.input, args.glob)
    progress = data.Progress("files", len(files))
    skipped = []

    def documents() -> Iterator[tuple[bool, str]]:
        for path in files:
            if path.suffixes[-2:] == [".jsonl", ".gz"] or path.suffix in (".jsonl", ".parquet"):
                for where, row in rows(path, args.field):
                    text = row.get(args.field) if isinstance(row, dict) else None
                    if not isinstance(text, str):
                        has = sorted(row) if isinstance(row, dict) else type(row).__name__
                        raise ValueError(f"{where} has no text in {args.field!r} (--field); it has {has}")
                    yield data.unit_hash(text, args.seed) < args.val_share, text
            else:
                try:
                    with open_text(path) as file:
                        whole = file.read()
                except UnicodeDecodeError:
                    skipped.append(path)
                    continue
                parts = [whole]
                if args.separator:
                    parts = [part.strip("\n") for part in whole.split(args.separator)]
                for text in parts:
                    yield data.unit_hash(text, args.seed) < args.val_share, text
            progress.add(1)

    source = ", ".join(path.name for path in args.input)[:200]
    with (
        data.TokenWriter(args.out / "train.bin", tokenizer=tokenizer, source=source) as train,
        data.TokenWriter(args.out / "val.bin", tokenizer=tokenizer, source=source) as val,
    ):
        for is_val, tokens in data.encode_many(tokenizer, documents(), args.workers):
            (val if is_val else train).add(tokens)
    data.report((train, val), started)
    if skipped:
        print(
            f"{len(skipped):,} files are not UTF-8 and were skipped: {', '.join(map(str, skipped[:5]))} ..."
        )


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
