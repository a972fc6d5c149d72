"""python data/pysrc/prepare.py

Writes train.bin, val.bin and manifest.json from the Python sources installed on this machine: the standard
library and the site-packages of the interpreter that runs this. A top-level package is a document, its files
in path order, each after a comment line with its path; a top-level module is a document of its own. Nothing
is downloaded. Files that are equal to an earlier one, or are not UTF-8, are left out and counted.

A package is validation if the hash of its name says so, which is the same on every machine, and if it is not
larger than val_share of the whole. (The default seed puts idlelib and encodings there, each a document of
more than a million bytes.) The standard library comes first, then site-packages, each in the order of the
names' hashes; under --max_bytes a package that no longer fits is passed over.
"""

import hashlib
import itertools
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import data


@dataclass
class Package:
    name: str
    root: str  # "stdlib" or "site-packages"
    paths: list[tuple[str, Path]]  # (path within the root, where it is), sorted
    size: int  # bytes on disk
    split: str = "train"
    files: int = 0  # what really went in
    bytes: int = 0
    hash: Any = field(default_factory=hashlib.sha256)  # over paths and contents


def find_packages() -> list[Package]:
    """Packages and top-level modules: the standard library, then site-packages, each by the name's hash."""
    paths = sysconfig.get_paths()
    roots = {Path(paths["stdlib"]).resolve(): "stdlib"}
    for key in ("purelib", "platlib"):
        roots.setdefault(Path(paths[key]).resolve(), "site-packages")
    packages = []
    for root, kind in roots.items():
        found: dict[str, list[tuple[str, Path]]] = {}
        for folder, names, files in os.walk(root):
            # The standard library's folder may hold site-packages: another root, or not this interpreter's.
            names[:] = [n for n in names if n not in ("site-packages", "dist-packages", "__pycache__")]
            for file in files:
                if file.endswith(".py"):
                    path = Path(folder, file)
                    inner = path.relative_to(root)
                    found.setdefault(inner.parts[0].removesuffix(".py"), []).append((inner.as_posix(), path))
        group = [Package(n, kind, sorted(p), sum(f.stat().st_size for _, f in p)) for n, p in found.items()]
        packages += sorted(group, key=lambda p: hashlib.sha256(p.name.encode()).digest())
    return packages


def choose(packages: list[Package], max_bytes: int, val_share: float, seed: int) -> list[Package]:
    """The packages that fit into max_bytes (0: all), with their split set."""
    chosen, total = [], 0
    for p in packages:
        if not max_bytes or total + p.size <= max_bytes:
            chosen.append(p)
            total += p.size
    if len(chosen) < 2:
        raise ValueError(
            f"max_bytes is {max_bytes}, which leaves {len(chosen)} of {len(packages)} packages; train and "
            "val need one each: raise it"
        )
    small = [p for p in chosen if p.size <= val_share * total]
    val = [p for p in small if data.unit_hash(p.name, seed) < val_share]
    for p in val or [min(small or chosen, key=lambda p: data.unit_hash(p.name, seed))]:
        p.split = "val"
    return chosen


def main(argv: list[str] | None = None) -> None:
    parser = data.prepare_parser(__file__, __doc__)
    data.add_split_options(parser, val_share=0.05)
    parser.set_defaults(seed=11)
    parser.add_argument(
        "--max_bytes", type=int, default=64_000_000, help="size of the sources, 0: all there is"
    )
    parser.add_argument(
        "--max_document",
        type=int,
        default=0,
        help="tokens of a document: a larger package is cut into several; 0: it stays whole",
    )
    args = parser.parse_args(argv)
    if args.max_document < 0:
        raise ValueError(
            f"max_document is {args.max_document}; it must be 0 (no limit) or a number of tokens"
        )
    started = time.monotonic()
    tokenizer = data.get_tokenizer(args.tokenizer)
    packages = choose(find_packages(), args.max_bytes, args.val_share, args.seed)
    progress = data.Progress("bytes", sum(p.size for p in packages))
    seen: set[bytes] = set()
    dropped = {"duplicate": 0, "not UTF-8": 0}

    def sources() -> Iterator[tuple[int, str]]:
        for i, p in enumerate(packages):
            for name, path in p.paths:
                content = path.read_bytes()
                progress.add(len(content))
                digest = hashlib.sha256(content).digest()
                if digest in seen:
                    dropped["duplicate"] += 1
                    continue
                seen.add(digest)
                try:
                    text = content.decode("utf-8-sig")
                except UnicodeDecodeError:
                    dropped["not UTF-8"] += 1
                    continue
                p.files += 1
                p.bytes += len(content)
                p.hash.update(name.encode() + b"\0" + digest)
                yield i, f"# {name}\n{text}" + ("" if text.endswith("\n") else "\n")

    source = f"Python {platform.python_version()}, standard library and site-packages"
    with data.write_splits(args.out, tokenizer=tokenizer, source=source) as (train, val):
        encoded = data.encode_many(tokenizer, sources(), args.workers)
        for i, parts in itertools.groupby(encoded, key=lambda item: item[0]):
            writer = val if packages[i].split == "val" else train
            tokens = np.concatenate([part for _, part in parts])
            size = args.max_document or len(tokens)
            for at in range(0, len(tokens), size):
                writer.add(tokens[at : at + size])
        listed = [
            dict(
                name=p.name, root=p.root, files=p.files, bytes=p.bytes, split=p.split, hash=p.hash.hexdigest()
            )
            for p in packages
            if p.files
        ]
        manifest = {"source": source, "dropped": dropped, "packages": listed}
        train.finish()
        val.finish()
        data.write_json(args.out / "manifest.json", manifest)  # once nothing else can fail
    data.report((train, val), started)
    print(", ".join(f"{n:,} files {why}" for why, n in dropped.items()) + f"; {args.out / 'manifest.json'}")


if __name__ == "__main__":
    data.run_script(main)
