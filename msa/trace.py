"""Where the GPU's time goes in a profiled training step: python -m msa.trace FILE

    python -m msa.trace out/run/trace_0.json.gz --vocab-size 50304 --d-model 768 --d-mlp 2048

FILE is what torch.profiler's export_chrome_trace wrote, of CPU and CUDA activities with record_shapes=True.
Each kernel, copy and memset counts in one part of the step, also what activation checkpointing runs again.
What tells the part, the first that applies:

    its name          kernels of this package, FlashAttention and NCCL; large copies to and from pinned memory
    an annotation     launched in an optimizer's step, or in a torch.profiler.record_function that is named
                      "optimizer", "gradients", "loss" or "embedding"
    the op around it  what attention's ops launch beside their kernels; telling names; the shapes of a matmul;
                      for the loss, those of anything with a dimension of vocab_size
    its name again    kernels of torch.compile are named after the ops that they fuse

What none of these tells is `other`, and its longest kernels are listed. The table adds up to the time from
the first kernel's start to the last one's end: `idle` is when nothing ran, and `overlap`, which is negative,
what counts in two parts since both ran at once. The profiler slows the host, and so makes `idle` longer.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from msa.bench import kernel_classes, label_of

LARGE_COPY = 2**20  # bytes; smaller copies to pinned memory are figures that the host reads
# In the order of a step, with the rows of msa.bench that tell a part, or the class of kernels without a row.
PARTS = {
    "embedding": (),
    "projections": (),
    "selection": ("select",),
    "schedule": ("schedule: count", "schedule: scan", "schedule: scatter"),
    "attention forward": ("forward", "combine", "Combine"),
    "attention backward": ("prepare", "backward", "sum dq", "sum dk, dv", "SumKeys"),
    "proxy": (
        *("proxy lse", "proxy backward", "sum dq_proxy", "sum dk_proxy", "sum kl"),
        *("dense lse", "dense kl", "round dq_proxy"),
    ),
    "dense attention forward": ("flash forward",),
    "dense attention backward": ("flash backward", "flash backward, before", "flash backward, after"),
    **dict.fromkeys(("MLP", "loss", "gradients", "optimizer", "other elementwise"), ()),
    **dict.fromkeys(("offload", "collectives", "other"), ()),
}
PART_OF_ROW = {row: part for part, rows in PARTS.items() for row in rows}
# The ops of attention, and the place of block_indices among their arguments: dense attention has none.
ATTENTION = {"msa::attention": ("forward", 5), "msa::attention_backward": ("backward", 7)}
MATMULS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}  # place of the first factor
ELEMENTWISE = re.compile(r"at::native|elementwise|^triton_(?!tem)|^Memcpy|^Memset")


class Part(NamedTuple):
    """A row of the table."""

    name: str
    ms: float
    kernels: int  # launches
    share: float  # of the time from the first kernel's start to the last one's end
    largest: tuple[tuple[str, float, int], ...] = ()  # (kernel's name, ms, launches), the longest first


class Sizes(NamedTuple):
    vocab_size: int
    d_model: int
    d_mlp: int


def read(trace: dict | Path | str) -> list[dict]:
    """The events of a trace that have a duration. A ValueError says why it is none."""
    name = "the trace" if isinstance(trace, dict) else str(trace)
    try:
        if not isinstance(trace, dict):
            data = Path(trace).read_bytes()
            # Not strict: the names of some kernels hold control characters.
            trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data, strict=False)
        events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
        sound = all(
            isinstance(e["ts"] + e["dur"], int | float)
            and isinstance(e["name"], str)
            and isinstance(e.get("args", {}), dict)
            for e in events
        )
        if not (events and sound):
            raise ValueError("events without times" if events else "no events")
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{name} is no trace that export_chrome_trace wrote ({type(error).__name__}: {error}); "
            "name another file, or profile again with train.py --profile=True"
        ) from error
    return events


class Host:
    """What the host was doing when it launched a kernel: ranges (ops and annotations), nested by thread."""

    def __init__(self, events: list[dict]) -> None:
        self.ranges: list[dict] = []
        self.by_id: dict[int, int] = {}  # External id -> index of the op
        self.by_launch: dict[int, int] = {}  # correlation -> index of the innermost range around the launch
        threads: dict[tuple, list[tuple]] = defaultdict(list)
        for e in events:
            args, kind = e.get("args", {}), e.get("cat")
            marks = threads[e.get("pid"), e.get("tid")]
            if kind in ("cuda_runtime", "cuda_driver") and "correlation" in args:
                marks.append((e["ts"], 1, args["correlation"]))  # sorts behind a range that begins with it
            elif kind == "cpu_op" or (kind == "user_annotation" and annotated_part(e["name"])):
                if kind == "cpu_op" and "External id" in args:
                    self.by_id[args["External id"]] = len(self.ranges)
                marks.append((e["ts"], -e["dur"], len(self.ranges)))
                self.ranges.append(e)
        self.parents = [-1] * len(self.ranges)
        for marks in threads.values():
            around: list[tuple[float, int]] = []  # (end, index), the innermost last
            for begin, minus_duration, index in sorted(marks):
                while around and around[-1][0] <= begin:
                    around.pop()
                innermost = around[-1][1] if around else -1
                if minus_duration > 0:
                    self.by_launch[index] = innermost
                else:
                    self.parents[index] = innermost
                    around.append((begin - minus_duration, index))

    def outwards(self, index: int) -> Iterator[dict]:
        while index >= 0:
            yield self.ranges[index]
            index = self.parents[index]

    def of(self, kernel: dict) -> tuple[list[dict], str | None]:
        """The op that launched it and the aten and msa ops around that, outwards; the annotated part."""
        args = kernel.get("args", {})
        launch = self.by_launch.get(args.get("correlation"), -1)
        op = self.by_id.get(args.get("External id"), launch)
        ops: list[dict] = []
        for e in self.outwards(op):
            # Ops of autograd tell nothing: checkpointing runs a whole layer again in any of them.
            if e["cat"] != "cpu_op" or (ops and not e["name"].startswith(("aten::", "msa::"))):
                break
            ops.append(e)
        ranges = (e for index in (launch, op) for e in self.outwards(index))
        return ops, next((annotated_part(e["name"]) for e in ranges if e["cat"] == "user_annotation"), None)


def annotated_part(name: str) -> str | None:
    if name.startswith("Optimizer."):  # torch.optim annotates step by itself
        return "optimizer"
    return name if name in ("loss", "optimizer", "gradients", "embedding") else None


def part_by_name(kernel: str, classes: set[str]) -> str | None:
    if kernel.startswith("nccl"):
        return "collectives"
    label, work = label_of(kernel, classes)
    return PART_OF_ROW.get(label) if work is not None or label in classes else None


def shapes_of(op: dict) -> list[list[int]]:
    """Of the op's arguments; [] for what is no tensor."""
    shapes = op.get("args", {}).get("Input Dims") or []
    return [s if isinstance(s, list) and all(isinstance(n, int) for n in s) else [] for s in shapes]


def part_of_matmul(op: dict, sizes: Sizes) -> str:
    """Two of its three dimensions are the weight's, the other one counts tokens."""
    factors = [s[-2:] for s in shapes_of(op)[MATMULS[op["name"]] :][:2] if len(s) >= 2]
    if len(factors) < 2:
        return "other"
    (m, k), (_, n) = factors
    weights = ({k, n}, {m, n})  # the second for the weight's gradient, a sum over tokens
    if {sizes.d_model, sizes.vocab_size} in weights:
        return "loss"
    if {sizes.d_model, sizes.d_mlp} in weights:
        return "MLP"
    return "projections" if any(sizes.d_model in weight for weight in weights) else "other"


def part_by_ops(kernel: str, ops: list[dict], sizes: Sizes) -> str:
    for op in ops:
        if op["name"] == "msa::select_blocks":
            return "selection"
        if op["name"] in ATTENTION:
            direction, place = ATTENTION[op["name"]]
            dense = "dense " if shapes_of(op)[place : place + 1] == [[]] else ""
            return f"{dense}attention {direction}"
    names = " ".join([kernel, *(op["name"] for op in ops)])
    if "embedding" in names:
        return "embedding"
    if re.search("log_softmax|nll_loss|cross_entropy", names):
        return "loss"
    innermost = ops[0]["name"] if ops else ""
    if innermost in MATMULS:
        return part_of_matmul(ops[0], sizes)
    shapes = [s for s in shapes_of(ops[0]) if s] if ops else []
    if any(s[-1] == sizes.vocab_size or s == [sizes.vocab_size, sizes.d_model] for s in shapes):
        return "loss"
    if "silu" in names or (innermost == "aten::mul" and any(s[-1] == sizes.d_mlp for s in shapes)):
        return "MLP"
    return "other elementwise" if ELEMENTWISE.search(kernel) else "other"


def parts(trace: dict | Path | str, *, vocab_size: int, d_model: int, d_mlp: int) -> list[Part]:
    """GPU time by part of a trace, or of the file of one (.json or .json.gz); then `overlap` and `idle`.

    Parts without a kernel are left out, and the list is empty if nothing ran on a GPU. What is no trace is a
    ValueError.
    """
    events, sizes = read(trace), Sizes(vocab_size, d_model, d_mlp)
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return []
    host, classes = Host(events), kernel_classes()
    by_name = {name: part_by_name(name, classes) for name in {e["name"] for e in kernels}}
    found: dict[str, dict[str, list]] = {part: {} for part in PARTS}
    for e in kernels:
        name, (ops, annotated) = e["name"], host.of(e)
        part = by_name[name]
        if "Pinned" in name and e.get("args", {}).get("bytes", 0) > LARGE_COPY:
            part = "offload"
        part = part or annotated or part_by_ops(name, ops, sizes)
        if part == "other" and ops and ops[0]["name"] in MATMULS and not shapes_of(ops[0]):
            name = f"matmul without shapes (profile with record_shapes=True): {name}"
        row = found[part].setdefault(name, [0.0, 0])
        row[0] += e["dur"]
        row[1] += 1

    first = min(e["ts"] for e in kernels)
    end = idle = busy = 0.0
    for begin, duration in sorted((e["ts"] - first, e["dur"]) for e in kernels):
        idle += max(0.0, begin - end)
        end = max(end, begin + duration)
        busy += duration
    span = end or 1.0
    table = []
    for part, rows in found.items():
        if rows:
            largest = sorted(((n, us / 1e3, count) for n, (us, count) in rows.items()), key=lambda r: -r[1])
            us, launches = (sum(column) for column in zip(*rows.values(), strict=True))
            table.append(Part(part, us / 1e3, launches, us / span, tuple(largest)))
    overlap = busy + idle - end
    if overlap > 5e-4 * span:  # less is rounding, or shows as 0.0%
        table.append(Part("overlap", -overlap / 1e3, 0, -overlap / span))
    return [*table, Part("idle", idle / 1e3, 0, idle / span)]


def format_parts(parts: list[Part], wall_ms: float | None = None, kernels: int = 0) -> str:
    """The table. wall_ms: the step by the host's clock; kernels: list so many, the longest, of every part."""
    if not parts:
        return "nothing ran on a GPU in this trace: profile CUDA activities too, on a GPU"
    lines = [f"{'part':<26}{'ms':>10}{'share':>9}{'launches':>10}"]
    total = Part("first to last kernel", sum(p.ms for p in parts), sum(p.kernels for p in parts), 1.0)
    for part in (*parts, total):
        launches = f"{part.kernels:>10,}" if part.kernels else ""
        lines.append(f"{part.name:<26}{part.ms:>10.2f}{part.share:>9.1%}{launches}")
        lines += [kernel_line(*kernel) for kernel in part.largest[:kernels]]
    if wall_ms is not None:
        lines.append(f"{'wall clock':<26}{wall_ms:>10.2f}")
    unknown = [kernel_line(*kernel) for p in parts if p.name == "other" for kernel in p.largest[:10]]
    if unknown and not kernels:
        lines += ["", "the longest of other (ms, launches):", *unknown]
    return "\n".join(lines)


def kernel_line(name: str, ms: float, launches: int) -> str:
    return f"{ms:>12.2f}{launches:>8,}  {name[:88]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m msa.trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a .json or .json.gz of export_chrome_trace")
    for name in ("--vocab-size", "--d-model", "--d-mlp"):
        parser.add_argument(name, type=int, required=True, metavar="N", help="as in the run's config.json")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="list the N longest of each part")
    args = parser.parse_args(arguments)
    try:
        table = parts(args.file, vocab_size=args.vocab_size, d_model=args.d_model, d_mlp=args.d_mlp)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_parts(table, kernels=args.kernels))
    return 0 if table else 1


if __name__ == "__main__":
    sys.exit(main())
