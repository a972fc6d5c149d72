"""python data/text/prepare.py --input FILE_OR_FOLDER ...

Writes train.bin and val.bin from text of your own. What a document is depends on a file's name:

    *.jsonl, *.jsonl.gz   a line, its text in --field
    *.parquet             a row, its text in the column --field (needs pyarrow)
    any other, *.gz too   the whole file, or its parts between --separator

Files that are no text (not UTF-8, or with NUL bytes) are skipped, counted and named. Broken rows (no JSON,
not UTF-8, without text in --field) are counted and named, and then nothing is written: --skip_broken does.
A document is validation if the hash of its text says so, so that equal documents go to the same side. With
fewer than some dozens of documents choose --val_share and --seed so that both sides get some.
"""

import contextlib
import gzip
import json
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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


class Broken:
    """What could not be read: how much, and the first few by name."""

    def __init__(self) -> None:
        self.count, self.first = 0, []

    def add(self, what: str) -> None:
        self.count += 1
        if len(self.first) < 5:
            self.first.append(what.encode("utf-8", "backslashreplace").decode())  # names of files may be odd

    def __str__(self) -> str:
        more = ["..."] if self.count > len(self.first) else []
        return f"{self.count:,}" + (f" ({'; '.join(self.first + more)})" if self.first else "")


def rows(path: Path, field: str) -> Iterator[tuple[str | None, str]]:
    """(text, "") for each row of a jsonl or parquet file, or (None, what is wrong with which row)."""
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ValueError("parquet files need pyarrow: pip install -e .[data]") from error
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                if field not in file.schema_arrow.names:
                    has = file.schema_arrow.names
                    raise ValueError(f"{path} has no column {field!r} (--field), but {has}")
                row = 0
                for batch in file.iter_batches(batch_size=256, columns=[field]):
                    for text in batch.column(0).to_pylist():
                        wrong = "" if isinstance(text, str) else f"{path} row {row} has no text in {field!r}"
                        yield (None if wrong else text), wrong
                        row += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is a damaged parquet file ({error}): get it again") from error
    else:
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path} line {number}"
                try:
                    row = json.loads(line.decode("utf-8"))
                except UnicodeDecodeError:
                    yield None, f"{where} is not UTF-8"
                except (ValueError, RecursionError) as error:
                    yield None, f"{where} is no JSON: {error}"
                else:
                    if isinstance(row, dict) and isinstance(row.get(field), str):
                        yield row[field], ""
                    else:
                        has = sorted(row) if isinstance(row, dict) else type(row).__name__
                        yield None, f"{where} has no text in {field!r} (--field), but {has}"


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """A file or what a .gz holds; ValueError where that is damaged."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            yield file
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is a damaged gzip file ({error}): get it again") from error


def read_text(path: Path) -> str | None:
    """A whole file, its line ends as they are; None if it is no text."""
    with open_bytes(path) as file:
        content = file.read()
    try:
        return None if b"\0" in content else content.decode("utf-8")
    except UnicodeDecodeError:
        return None


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
    parser.add_argument("--skip_broken", action="store_true", help="leave broken rows out")
    args = parser.parse_args(argv)
    started = time.monotonic()
    tokenizer = data.get_tokenizer(args.tokenizer)
    files = find_files(args.input, args.glob)
    progress = data.Progress("files", len(files))
    no_text, broken = Broken(), Broken()

    def split_of(text: str) -> tuple[bool, str]:
        return data.unit_hash(text, args.seed) < args.val_share, text

    def documents() -> Iterator[tuple[bool, str]]:
        n_rows = 0
        for path in files:
            if path.suffixes[-2:] == [".jsonl", ".gz"] or path.suffix in (".jsonl", ".parquet"):
                for text, wrong in rows(path, args.field):
                    n_rows += 1
                    if text is not None:
                        yield split_of(text)
                        continue
                    broken.add(wrong)
                    if broken.count == n_rows == 100 and not args.skip_broken:
                        return  # no broken lines, but another format or --field: no need to read it all
            else:
                whole = read_text(path)
                if whole is None:
                    no_text.add(str(path))
                elif args.separator:
                    yield from (split_of(part.strip("\n")) for part in whole.split(args.separator))
                else:
                    yield split_of(whole)
            progress.add(1)

    source = ", ".join(path.name for path in args.input)[:200]
    with data.write_splits(args.out, tokenizer=tokenizer, source=source) as (train, val):
        for is_val, tokens in data.encode_many(tokenizer, documents(), args.workers):
            (val if is_val else train).add(tokens)
        if broken.count and not args.skip_broken:
            raise ValueError(
                f"broken rows in the input: {broken}; mend them, or leave them out with --skip_broken"
            )
        if not train.n_docs + val.n_docs:
            raise ValueError(
                f"there is no text in the input: files that are no UTF-8 text {no_text}, broken rows "
                f"{broken}, and what is left is empty; see --input and --glob"
            )
    data.report((train, val), started)
    for what, found in (("files that are no UTF-8 text", no_text), ("broken rows", broken)):
        if found.count:
            print(f"skipped {what}: {found}")


if __name__ == "__main__":
    data.run_script(main)
