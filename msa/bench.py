"""Times our attention beside FlashAttention-4 (dense) and flash-msa on one GPU: python -m msa.bench

    python -m msa.bench --seq-len 8192 131072
    python -m msa.bench --mode warmup --seq-len 8192 32768
    python -m msa.bench --seq-len 1048576 --pattern skewed --peers fa4 --json 1m.json

All variants of a shape run in one process and in turns (ours, FA4, flash-msa, ours, ...), because a card's
clock drifts by more than some differences are large. Each call gets other data than the call before, as in
training, from a small pool made beforehand. Times are medians between CUDA events. Before the first of them a
buffer larger than the L2 cache is written many times over, which also lets the host get ahead: its overhead
shows only where it is longer than the work itself.

    forward        ours, sparse: selection and attention. backward: all gradients, and the true KL (kl_probe)
    host           the time until everything is launched, of a single call; a single backward wakes autograd's
                   thread, which a model does once for all its layers: hence also that of one of 8 in a row,
                   and of all 8 replayed as one CUDA graph
    peak           the most memory allocated during a call, inputs included, the rest of the pool not
    first call     wall clock of the very first forward and backward, compilation included

flash-msa compiles again when the selection changes, so it stands there twice: `same data` is its speed at its
best, `new data` what a training step sees.

Modes: `sparse` times sparse_attention, `warmup` warmup_attention, dense and with the proxy's KL over all
visible tokens, beside flash-msa's function for that.

Patterns are of sparse alone. `random` selects with random proxies. `skewed` (block 0, the two previous
neighbours, the rest random) and `local` (the nearest blocks) hand over block_indices; select_blocks runs on
the random proxies all the same, its result unused, so that the forward still holds the price of a selection.
The peers can't take one: flash-msa always selects from the random proxies.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

import msa
from msa.check import compiler_errors, first_line, package_version

BLOCK = 128
HEAD_DIM = 128
GIB = 2**30
VERSIONS = ("nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi", "flash-attn-4", "flash-msa", "triton")
INSTALL_PEERS = {
    "fa4": ("flash-attn-4", "pip install -c constraints.txt -e '.[hopper]'"),
    "flash-msa": ("flash-msa", "pip install --no-deps flash-msa==0.1.1; it also needs ninja and nvcc"),
}


# ---- shapes, and the work that they mean ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    proxy_heads: int
    top_k: int

    @property
    def group(self) -> int:
        return self.heads // self.proxy_heads

    @property
    def slots(self) -> int:
        return self.top_k // BLOCK

    @property
    def edges(self) -> int:
        """(query, proxy head, selected block) triples: early queries have fewer blocks than slots."""
        full, rest = divmod(self.seq_len, BLOCK)
        blocks = sum(min(self.slots, i + 1) for i in range(min(full, self.slots)))
        blocks += max(0, full - self.slots) * self.slots
        per_head = blocks * BLOCK + rest * min(self.slots, full + 1)
        return self.batch * self.proxy_heads * per_head

    @property
    def rows(self) -> int:
        """(query, head, selected block) triples: a row is one query head against one block of keys."""
        return self.edges * self.group

    @property
    def square(self) -> float:
        """(query, visible key) pairs of a head, as half the square."""
        return self.batch * self.seq_len**2 / 2

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}/{self.proxy_heads} heads"
        return f"{self.seq_len:,} tokens, batch {self.batch}, {heads}"


@dataclasses.dataclass(frozen=True)
class Work:
    """One row of the breakdown: the kernel's class, what it multiplies and what it has to move, by shape.

    FLOPs count a selected block as a whole, and selection and all that is dense as half the square. Bytes are
    what must cross HBM if what all rows share (K, V) costs nothing: bf16 rows of D, fp32 statistics, in both
    directions.
    """

    label: str
    kernel: str  # name of its class, or what the name of another's kernel holds
    flops: Callable[[Shape], float] | None = None
    bytes: Callable[[Shape], float] | None = None
    marks: str = ""  # in the kernel's name, where a class serves several rows


def _queries(s: Shape) -> int:
    return s.batch * s.seq_len


WORK = (
    Work("select", "Select", lambda s: 2 * HEAD_DIM * s.proxy_heads * s.square),
    Work("schedule: count", "BuildSchedule", bytes=lambda s: 4 * s.edges, marks="_count_"),
    Work("schedule: scan", "BuildSchedule", marks="_scan_"),
    Work("schedule: scatter", "BuildSchedule", bytes=lambda s: 8 * s.edges, marks="_scatter_"),
    # reads the rows of q, writes partial out and LSE
    Work(
        "forward",
        "Forward",
        lambda s: 4 * HEAD_DIM * BLOCK * s.rows,
        lambda s: (4 * HEAD_DIM + 4) * s.rows,
    ),
    # one proxy query a row; writes LSE
    Work(
        "proxy lse",
        "ProxyLse",
        lambda s: 2 * HEAD_DIM * BLOCK * s.edges,
        lambda s: (2 * HEAD_DIM + 4) * s.edges,
    ),
    # reads the partials, writes one row a query
    Work(
        "combine",
        "Combine",
        bytes=lambda s: (2 * HEAD_DIM + 4) * (s.rows + _queries(s) * s.heads),
        marks="softmaxTrue",
    ),
    # reads out and its gradient
    Work("prepare", "Prepare", bytes=lambda s: 4 * HEAD_DIM * _queries(s) * s.heads),
    # reads the rows of q and of the gradient of out, writes partial dq and one teacher row an edge
    Work(
        "backward",
        "Backward",
        lambda s: 10 * HEAD_DIM * BLOCK * s.rows,
        lambda s: 6 * HEAD_DIM * s.rows + 2 * BLOCK * s.edges,
    ),
    # slots into gradients, as combine
    Work(
        "sum dq",
        "Combine",
        bytes=lambda s: 2 * HEAD_DIM * (s.rows + _queries(s) * s.heads),
        marks="times_grad_klFalse",
    ),
    Work("sum dk, dv", "SumKeys", marks="times_grad_klFalse"),
    # reads teacher and proxy query, writes partial dq_proxy
    Work(
        "proxy backward",
        "ProxyBackward",
        lambda s: 6 * HEAD_DIM * BLOCK * s.edges,
        lambda s: (4 * HEAD_DIM + 2 * BLOCK) * s.edges,
    ),
    Work(
        "sum dq_proxy",
        "Combine",
        bytes=lambda s: 2 * HEAD_DIM * (s.edges + _queries(s) * s.proxy_heads),
        marks="times_grad_klTrue",
    ),
    # in warmup; each query head's scores and the proxy's are made once, dk_proxy and dq_proxy from the latter
    Work("dense lse", "DenseLse", lambda s: 2 * HEAD_DIM * s.proxy_heads * s.square),
    Work("dense kl", "DenseKl", lambda s: 2 * HEAD_DIM * (s.heads + 3 * s.proxy_heads) * s.square),
    # fp32 sums into bf16 rows
    Work("round dq_proxy", "RoundQueries", bytes=lambda s: 6 * HEAD_DIM * _queries(s) * s.proxy_heads),
    Work("sum dk_proxy", "SumKeys", marks="times_grad_klTrue"),
    Work("sum kl", "SumKl"),
)
# FlashAttention names its kernels after files and classes; PyTorch's own has the same beginnings
FLASH = (
    Work("flash backward, before", "flash_bwd_preprocess"),
    Work("flash backward, after", "flash_bwd_postprocess"),
    Work("flash forward", "flash_fwd", lambda s: 4 * HEAD_DIM * s.heads * s.square),
    Work("flash backward", "flash_bwd", lambda s: 10 * HEAD_DIM * s.heads * s.square),
)


def kernel_classes() -> set[str]:
    """The classes that our kernels may be named after: the table's and those of loaded modules."""
    names = {work.kernel for work in WORK}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith("msa.hopper."):
            names |= {n for n, x in vars(module).items() if isinstance(x, type) and hasattr(x, "arguments")}
    return names


def label_of(kernel: str, classes: set[str]) -> tuple[str, Work | None]:
    """The row that a kernel of the profile belongs to. CuTeDSL puts class and fields into the name."""
    found = [c for c in classes if re.search(rf"(^|_){c}(?![A-Z])|{c}_object_at", kernel)]
    if kernel.startswith("kernel_") and found:
        name = max(found, key=len)
        for work in WORK:
            if work.kernel == name and work.marks in kernel:
                return work.label, work
        return name, None
    for work in FLASH:
        if work.kernel in kernel:
            return work.label, work
    if kernel.startswith("kernel_"):
        return re.sub("^kernel_cutlass_(kernel_)?", "", kernel).split("_tensorptr")[0][:40], None
    plain = kernel.removeprefix("void ").split("(")[0].split("<")[0].split("::")[-1]
    functor = re.search(r"(\w+)Functor", kernel)
    return (f"{plain} {functor.group(1)}" if functor else plain)[:40], None


# ---- inputs -----------------------------------------------------------------------------------------


def build_indices(
    pattern: str,
    batch: int,
    seq_len: int,
    proxy_heads: int,
    slots: int,
    generator: torch.Generator,
    elements: int = 2**26,
) -> Tensor:
    """block_indices (B, S, Hp, slots) int32 on the generator's device, in chunks of `elements` scores."""
    device = generator.device
    out = torch.full((batch, seq_len, proxy_heads, slots), -1, dtype=torch.int32, device=device)
    n_blocks = -(-seq_len // BLOCK)
    chunk = max(1, elements // (batch * proxy_heads * n_blocks))
    for begin in range(0, seq_len, chunk):
        end = min(begin + chunk, seq_len)
        local = torch.arange(begin, end, device=device)[:, None, None] // BLOCK  # (c, 1, 1)
        if pattern == "local":
            picked = (local - torch.arange(slots, device=device)).clamp(min=-1)  # (c, 1, slots)
        elif pattern == "skewed":
            blocks = torch.arange(n_blocks, device=device)
            size = (batch, end - begin, proxy_heads, n_blocks)
            rank = torch.rand(size, generator=generator, device=device)
            rank += (blocks == 0) * 4.0 + (blocks == local - 1) * 2.0 + (blocks == local - 2) * 1.0
            rank.masked_fill_(blocks >= local, -1.0)
            best = rank.topk(min(slots - 1, n_blocks), -1)
            earlier = best.indices.masked_fill_(best.values < 0, -1)  # (B, c, Hp, <= slots - 1)
            picked = torch.cat([local.expand(*size[:3], 1), earlier], -1)
        else:
            raise ValueError(f"pattern: must be skewed or local, got {pattern!r}")
        out[:, begin:end, :, : picked.shape[-1]] = picked.to(torch.int32)
    return out


@dataclasses.dataclass
class Data:
    q: Tensor  # (B, S, H, D)
    k: Tensor  # (B, S, Hkv, D)
    v: Tensor
    q_proxy: Tensor  # (B, S, Hp, D)
    k_proxy: Tensor  # (B, S, 1, D)
    grad_out: Tensor  # (B, S, H, D)
    block_indices: Tensor | None  # (B, S, Hp, k)


def make_data(shape: Shape, pattern: str, seed: int, device: str = "cuda") -> Data:
    generator = torch.Generator(device).manual_seed(seed)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.proxy_heads, 1, shape.heads)
    size, like = (shape.batch, shape.seq_len), dict(dtype=torch.bfloat16, device=device)
    tensors = [torch.randn(*size, n, HEAD_DIM, generator=generator, **like) for n in heads]
    indices = None
    if pattern != "random":
        indices = build_indices(
            pattern, shape.batch, shape.seq_len, shape.proxy_heads, shape.slots, generator
        )
    return Data(*tensors, indices)


def make_pool(shape: Shape, pattern: str, seed: int) -> list[Data]:
    """Three sets, two where three would take more than a third of the memory."""
    elements = shape.batch * shape.seq_len * HEAD_DIM
    elements *= 2 * shape.heads + 2 * shape.kv_heads + shape.proxy_heads + 1
    room = torch.cuda.get_device_properties(0).total_memory / 3
    return [make_data(shape, pattern, seed + i) for i in range(3 if 3 * 2 * elements < room else 2)]


# ---- variants ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Variant:
    """Something to time. `leaves` turns a set into what `forward` takes; this is not timed."""

    name: str
    leaves: Callable[[Data], list[Tensor]]
    forward: Callable[[list[Tensor], Data], tuple[list[Tensor], list[Tensor]]]  # outputs, their gradients
    errors: tuple[type[BaseException], ...]  # those that don't end the run
    same_data: bool = False
    samples: list[dict[str, float]] = dataclasses.field(default_factory=list)
    first_call_seconds: float | None = None
    compiled: int | None = None  # kernels that the first call compiled (known for ours alone)
    seconds: float = 0.0  # spent on it
    error: str | None = None


def peer_errors() -> tuple[type[BaseException], ...]:
    """What a peer may raise without ending the run."""
    others = (AssertionError, AttributeError, LookupError, OSError, subprocess.SubprocessError)
    return (*compiler_errors(), *others)


def ours(shape: Shape, mode: str = "sparse", device: str = "cuda") -> Variant:
    kl_factor = torch.full((), 1 / (shape.batch * shape.seq_len * shape.proxy_heads), device=device)

    def leaves(data: Data) -> list[Tensor]:
        probe = torch.zeros(shape.proxy_heads, device=device)
        tensors = (data.q, data.k, data.v, data.q_proxy, data.k_proxy, probe)
        return [x.detach().requires_grad_() for x in tensors]

    def forward(tensors: list[Tensor], data: Data) -> tuple[list[Tensor], list[Tensor]]:
        *inputs, kl_probe = tensors
        if mode == "warmup":
            return list(msa.warmup_attention(*inputs, kl_probe=kl_probe)), [data.grad_out, kl_factor]
        if data.block_indices is None:
            selection = dict(top_k=shape.top_k)
        else:
            msa.select_blocks(*inputs[3:], top_k=shape.top_k)
            selection = dict(block_indices=data.block_indices)
        return list(msa.sparse_attention(*inputs, **selection, kl_probe=kl_probe)), [data.grad_out, kl_factor]

    return Variant("msa", leaves, forward, (torch.OutOfMemoryError,))


def fa4(shape: Shape, mode: str) -> Variant:
    from flash_attn.cute.interface import flash_attn_func

    def leaves(data: Data) -> list[Tensor]:
        return [x.detach().requires_grad_() for x in (data.q, data.k, data.v)]

    def forward(tensors: list[Tensor], data: Data) -> tuple[list[Tensor], list[Tensor]]:
        out = flash_attn_func(*tensors, causal=True)
        return [out[0] if isinstance(out, tuple) else out], [data.grad_out]

    return Variant("fa4", leaves, forward, peer_errors())


def flash_msa(shape: Shape, mode: str) -> Variant:
    from flash_msa import flash_msa_func, flash_msa_warmup_func

    def leaves(data: Data) -> list[Tensor]:
        tensors = (data.q_proxy, data.k_proxy, data.q, data.k, data.v)
        return [x.transpose(1, 2).contiguous().requires_grad_() for x in tensors]

    def forward(tensors: list[Tensor], data: Data) -> tuple[list[Tensor], list[Tensor]]:
        if mode == "warmup":
            out, kl = flash_msa_warmup_func(*tensors, shape.top_k, HEAD_DIM**-0.5)
        else:
            out, kl = flash_msa_func(*tensors, shape.top_k, HEAD_DIM**-0.5)
        return [out, kl], [data.grad_out.flatten(2), torch.ones_like(kl)]

    if mode == "warmup":  # nothing in it depends on the data
        return Variant("flash-msa", leaves, forward, peer_errors())
    return Variant("flash-msa, same data", leaves, forward, peer_errors(), same_data=True)


PEERS = {"fa4": fa4, "flash-msa": flash_msa}


# ---- timing -----------------------------------------------------------------------------------------


class Clock:
    """Times calls of variants, one at a time."""

    def __init__(self) -> None:
        self.flush = torch.empty(2**29, dtype=torch.int8, device="cuda")

    def head_start(self) -> None:
        for _ in range(24):
            self.flush.zero_()

    def sample(self, variant: Variant, data: Data) -> dict[str, float]:
        wall = time.perf_counter()
        leaves = variant.leaves(data)
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.head_start()
        launched = time.perf_counter()
        start.record()
        outputs, grads = variant.forward(leaves, data)
        middle.record()
        gradients = torch.autograd.grad(outputs, leaves, grads)
        end.record()
        launched = time.perf_counter() - launched
        torch.cuda.synchronize()
        inputs = sum(x.nbytes for x in [*leaves, data.grad_out])
        peak = torch.cuda.max_memory_allocated() - before + inputs
        del outputs, grads, gradients, leaves
        variant.seconds += time.perf_counter() - wall
        return {
            "forward_ms": start.elapsed_time(middle),
            "backward_ms": middle.elapsed_time(end),
            "total_ms": start.elapsed_time(end),
            "host_ms": launched * 1e3,
            "peak_gib": peak / GIB,
        }


def compile_count() -> int:
    """Kernels of ours that this process has compiled."""
    return getattr(sys.modules.get("msa.hopper.jit"), "compile_count", 0)


def attempt(clock: Clock, variant: Variant, data: Data) -> None:
    """One more sample, or the reason why there is none."""
    try:
        variant.samples.append(clock.sample(variant, data))
    except variant.errors as error:
        variant.error = first_line(error)
    if variant.error is not None:
        gc.collect()  # outside of the handler, whose traceback holds tensors
        torch.cuda.empty_cache()


def make_variants(shape: Shape, mode: str, peers: Sequence[str]) -> list[Variant]:
    variants = [ours(shape, mode)]
    for name in peers:
        package, remedy = INSTALL_PEERS[name]
        error = None if package_version(package) else f"not installed: {remedy}"
        if error is None:
            try:
                variants.append(PEERS[name](shape, mode))
            except peer_errors() as failure:
                error = first_line(failure)
        if error is not None:
            variants.append(Variant(name, None, None, (), error=error))
    return variants


def measure(
    clock: Clock, variants: list[Variant], pool: list[Data], iterations: int, peer_seconds: float
) -> list[Variant]:
    """Fills in the samples of all variants; returns them and those on new data.

    A peer that took `peer_seconds` gets no more calls once it has a sample.
    """
    on_new_data = []
    for variant in variants:
        if variant.error is not None:
            continue
        compiled = compile_count()
        attempt(clock, variant, pool[0])
        if variant.error is not None:
            continue
        variant.samples.clear()
        variant.first_call_seconds = variant.seconds
        if variant.name == "msa":
            variant.compiled = compile_count() - compiled
        if variant.same_data:
            name = variant.name.replace("same", "new")
            twin = dataclasses.replace(variant, name=name, samples=[], first_call_seconds=None, seconds=0.0)
            on_new_data.append(twin)
            for data in pool[1:]:  # each of them once: the second time it would be known
                if twin.error is None and twin.seconds < peer_seconds:
                    attempt(clock, twin, data)
    for i in range(iterations + 1):
        for variant in variants:
            late = variant.name != "msa" and variant.seconds > peer_seconds and variant.samples
            if variant.error is None and not late:
                attempt(clock, variant, pool[0 if variant.same_data else (i + 1) % len(pool)])
    for variant in variants:
        variant.samples = variant.samples[1:] or variant.samples  # the first round warms up
    return variants + on_new_data


def host_in_a_row(shape: Shape, mode: str, data: Data, calls: int = 8) -> tuple[float, float | None]:
    """Milliseconds that the host takes for one of several calls of ours, as a model's layers make them, and
    for replaying all of them as one CUDA graph, None where the reference runs: it waits for the GPU."""
    variant = ours(shape, mode)

    def launch(leaves: list[list[Tensor]]) -> list[Tensor]:
        results = [variant.forward(tensors, data) for tensors in leaves]
        outputs = [x for outputs, _ in results for x in outputs]
        grads = [x for _, grads in results for x in grads]
        return list(torch.autograd.grad(outputs, [x for tensors in leaves for x in tensors], grads))

    def timed(call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - begin
        torch.cuda.synchronize()
        del result
        return seconds * 1e3

    python = []
    for _ in range(5):
        leaves = [variant.leaves(data) for _ in range(calls)]
        python.append(timed(lambda leaves=leaves: launch(leaves)))
    slots = shape.top_k // BLOCK if mode == "sparse" else None
    group = shape.heads // shape.proxy_heads
    if not msa._use_kernels(data.q.device, data.q.dtype, HEAD_DIM, BLOCK, slots, group, 1):
        return statistics.median(python) / calls, None
    with torch.cuda.stream(torch.cuda.Stream()):  # autograd's work before a capture is to be on a side stream
        launch(leaves)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(leaves)
    replays = [timed(graph.replay) for _ in range(5)]
    return statistics.median(python) / calls, statistics.median(replays)


def profile(shape: Shape, mode: str, pool: list[Data]) -> list[dict]:
    """Milliseconds of each kernel in a forward and backward of ours: means over the pool."""
    from torch.profiler import DeviceType, ProfilerActivity

    variant = ours(shape, mode)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
        for data in pool:
            leaves = variant.leaves(data)
            outputs, grads = variant.forward(leaves, data)
            torch.autograd.grad(outputs, leaves, grads)
            del leaves, outputs, grads
        torch.cuda.synchronize()
    events = [
        (event.key, event.self_device_time_total / 1e3, event.count)
        for event in trace.key_averages()
        if event.device_type == DeviceType.CUDA
    ]
    return breakdown(events, shape, len(pool))


def breakdown(events: list[tuple[str, float, int]], shape: Shape, calls: int) -> list[dict]:
    """(kernel's name, ms, launches) of `calls` calls -> rows in the table's order, then others by time."""
    rows: dict[str, dict] = {}
    classes = kernel_classes()
    for kernel, milliseconds, launches in events:
        label, work = label_of(kernel, classes)
        row = rows.setdefault(label, {"kernel": label, "ms": 0.0, "launches": 0.0})
        row["ms"] += milliseconds / calls
        row["launches"] += launches / calls
        row["work"] = work
    for row in rows.values():
        work, seconds = row.pop("work"), row["ms"] / 1e3
        if work is not None and seconds > 0:
            row["tflops"] = work.flops(shape) / seconds / 1e12 if work.flops else None
            row["tb_per_s"] = work.bytes(shape) / seconds / 1e12 if work.bytes else None
    order = list(dict.fromkeys(work.label for work in (*FLASH[2:], *FLASH[:2], *WORK)))

    def place(row: dict) -> tuple[int, float]:
        known = row["kernel"] in order
        return (order.index(row["kernel"]) if known else len(order), -row["ms"])

    return sorted(rows.values(), key=place)


def measure_ceilings() -> dict[str, float]:
    """What this card does now: a large bf16 matmul, and a copy within its memory (bytes read and written)."""

    def median_ms(call: Callable[[], object]) -> float:
        times = []
        for i in range(25):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if i >= 5:
                times.append(start.elapsed_time(end))
        return statistics.median(times)

    n = 8192
    a, b, c = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    matmul = median_ms(lambda: torch.matmul(a, b, out=c))
    source = torch.zeros(GIB, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy = median_ms(lambda: target.copy_(source))
    return {"matmul_tflops": 2 * n**3 / matmul / 1e9, "copy_tb_per_s": 2 * source.nbytes / copy / 1e9}


# ---- output -----------------------------------------------------------------------------------------


def summarize(variant: Variant) -> dict:
    """Medians of a variant's samples, for the table and for JSON."""
    medians = {}
    if variant.samples:
        medians = {key: statistics.median(s[key] for s in variant.samples) for key in variant.samples[0]}
    return {
        "name": variant.name,
        **medians,
        "first_call_seconds": variant.first_call_seconds,
        "compiled": variant.compiled,
        "error": variant.error,
        "samples": variant.samples,
    }


def number(x: float | None, width: int = 10) -> str:
    if x is None:
        return f"{'':>{width}}"
    digits = 0 if x >= 1000 else 1 if x >= 100 else 2 if x >= 1 else 3
    return f"{x:>{width},.{digits}f}"


def format_result(result: dict, ceilings: dict[str, float]) -> str:
    """The tables of one shape."""
    lines = [f"== {result['title']}", ""]
    columns = ("forward ms", "backward ms", "both ms", "host ms", "peak GiB", "first call s", "samples")
    lines.append(f"{'':<22}" + "".join(f"{column:>13}" for column in columns))
    keys = ("forward_ms", "backward_ms", "total_ms", "host_ms", "peak_gib", "first_call_seconds")
    for row in result["variants"]:
        if row["samples"]:
            cells = "".join(number(row.get(key), 13) for key in keys)
            lines.append(f"{row['name']:<22}{cells}{len(row['samples']):>13}")
        if row["error"]:
            lines.append(f"{row['name']:<22}  {'stopped: ' if row['samples'] else ''}{row['error']}")
    if result["kernels"]:
        limits = (ceilings["matmul_tflops"], ceilings["copy_tb_per_s"])
        lines += ["", f"{'kernels of msa':<40}{'ms':>10}{'launches':>10}{'TFLOP/s':>10}{'TB/s':>10}"]
        for row in result["kernels"]:
            cells = number(row["ms"]) + f"{row['launches']:>10.1f}"
            rates = [row.get("tflops"), row.get("tb_per_s")]
            shares = [
                f"{rate / limit:.0%} of {what}"
                for rate, limit, what in zip(rates, limits, ("matmul", "copy"), strict=True)
                if rate is not None
            ]
            lines.append(
                f"{row['kernel']:<40}{cells}{number(rates[0])}{number(rates[1])}  {', '.join(shares)}"
            )
        total = sum(row["ms"] for row in result["kernels"])
        lines.append(f"{'all':<40}{number(total)}")
    ratios = result["ratios"]
    if ratios:
        lines.append("")
        for name, ratio in ratios.items():
            text = f"msa against {name:<22} {ratio['time']:.2f}x as fast"
            if result["mode"] == "warmup" and name == "fa4":  # which has no proxy to teach
                text = f"msa warmup takes {1 / ratio['time']:.2f} times FA4 dense"
            lines.append(f"{text}, {ratio['memory']:.2f}x the memory")
    return "\n".join(lines)


def compare(rows: list[dict]) -> dict[str, dict[str, float]]:
    mine, *others = rows
    return {
        other["name"]: {
            "time": other["total_ms"] / mine["total_ms"],
            "memory": mine["peak_gib"] / other["peak_gib"],
        }
        for other in others
        if mine["samples"] and other["samples"]
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m msa.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=("sparse", "warmup"), default="sparse")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[8192, 32768, 131072], metavar="S")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--proxy-heads", type=int, help="default: as many as --kv-heads")
    parser.add_argument("--top-k", type=int, default=2048, help="selected tokens a query")
    parser.add_argument("--pattern", choices=("random", "skewed", "local"), default="random")
    parser.add_argument(
        "--peers", nargs="+", choices=("none", *PEERS), help="default: those that are installed"
    )
    parser.add_argument(
        "--peer-seconds", type=float, default=60, help="per peer and shape, then no more calls"
    )
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--workspace-gib", type=float, metavar="GIB", help="memory of a chunk's partial rows, by default 6"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    parser.add_argument(
        "--breakdown", action=argparse.BooleanOptionalAction, default=True, help="time each kernel of ours"
    )
    args = parser.parse_args(arguments)
    if args.proxy_heads is None:
        args.proxy_heads = args.kv_heads
    for name in ("batch", "heads", "kv_heads", "proxy_heads", "top_k", "iterations"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if min(args.seq_len) < 1:
        parser.error("--seq-len must be at least 1")
    if args.workspace_gib is not None and not 0 < args.workspace_gib < math.inf:
        parser.error("--workspace-gib must be above 0")
    if args.top_k % BLOCK:
        parser.error(f"--top-k must be a multiple of {BLOCK}")
    if args.heads % args.proxy_heads or args.proxy_heads % args.kv_heads:
        parser.error("--heads must be a multiple of --proxy-heads, and that of --kv-heads")
    if args.mode == "warmup" and args.pattern != "random":
        parser.error("--pattern is of sparse alone, warmup selects nothing")
    if args.peers and "none" in args.peers and len(args.peers) > 1:
        parser.error("--peers none stands alone")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if not torch.cuda.is_available():
        print(
            "msa.bench times GPU kernels, and PyTorch sees no NVIDIA GPU here. python -m msa.check says why.",
            file=sys.stderr,
        )
        return 2
    if args.workspace_gib is not None:
        why = msa._no_kernels(torch.device("cuda", torch.cuda.current_device()))
        if why is not None:
            print(f"--workspace-gib is of the kernels, and none run here: {why}", file=sys.stderr)
            return 2
        from msa import hopper

        hopper.workspace_bytes = int(args.workspace_gib * GIB)
    peers = args.peers
    if peers is None:
        peers = [name for name, (package, _) in INSTALL_PEERS.items() if package_version(package)]
    peers = [] if peers == ["none"] else list(dict.fromkeys(peers))
    card = torch.cuda.get_device_properties(0)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": card.name,
        "compute_capability": [card.major, card.minor],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "versions": {name: package_version(name) for name in VERSIONS},
        "arguments": {key: str(x) if isinstance(x, Path) else x for key, x in vars(args).items()},
        "ceilings": measure_ceilings(),
        "results": [],
    }
    ceilings = report["ceilings"]
    versions = ", ".join(f"{name} {v}" for name, v in report["versions"].items() if v)
    print(f"{card.name}, torch {torch.__version__}, {versions}, {report['date']}")
    print(
        f"ceilings now: bf16 matmul {ceilings['matmul_tflops']:.0f} TFLOP/s, "
        f"copy {ceilings['copy_tb_per_s']:.2f} TB/s\n",
        flush=True,
    )
    clock, failed = Clock(), False
    for seq_len in args.seq_len:
        shape = Shape(args.batch, seq_len, args.heads, args.kv_heads, args.proxy_heads, args.top_k)
        gc.collect()
        torch.cuda.empty_cache()
        pool = make_pool(shape, args.pattern, args.seed)
        variants = make_variants(shape, args.mode, peers)
        variants = measure(clock, variants, pool, args.iterations, args.peer_seconds)
        failed |= variants[0].error is not None
        kernels = profile(shape, args.mode, pool) if args.breakdown and variants[0].error is None else []
        rows = [summarize(variant) for variant in variants]
        # Where 8 calls fill neither the memory nor the queue of launches, so that the host never waits.
        short = shape.batch * shape.seq_len <= 4096 and variants[0].error is None
        host = host_in_a_row(shape, args.mode, pool[0]) if short else None
        result = {
            "title": f"{shape}, "
            + (f"top_k {args.top_k}, {args.pattern}" if args.mode == "sparse" else "warmup"),
            "shape": {**dataclasses.asdict(shape), "edges": shape.edges, "rows": shape.rows},
            "mode": args.mode,
            "pattern": args.pattern,
            "variants": rows,
            "kernels": kernels,
            "host_in_a_row_ms": host and host[0],
            "host_in_a_graph_ms": host and host[1],
            "ratios": compare(rows),
        }
        report["results"].append(result)
        print(format_result(result, ceilings) + "\n", flush=True)
        if host is not None:
            graph = "" if host[1] is None else f"; of all 8 as a CUDA graph {host[1]:.2f} ms"
            print(f"host time of one of 8 calls in a row: {host[0]:.2f} ms{graph}\n", flush=True)
        if args.json is not None:  # after each shape: a long run that is stopped keeps what it has
            args.json.write_text(json.dumps(report, indent=1) + "\n")
        del pool, variants
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
