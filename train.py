"""Trains through the stages of a config: dense, warmup of the proxy, sparse, longer sequences.

    python train.py configs/quickstart.py                          # a CPU or one GPU
    torchrun --nproc_per_node=8 train.py configs/1m_ctx.py         # a node
    python train.py configs/quickstart.py --stage_steps=3 --out_dir=out/try
    python train.py --help                                         # every field

The same command continues a run that stopped. `out_dir` receives config.json, metrics.jsonl, checkpoint.pt
(and those before it), curves.png and lock. Exit codes: 0 done or stopped by a signal, 1 the run could not go
on, 2 bad input.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # during the imports: no traceback

import bisect
import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import json
import math
import mmap
import os
import re
import resource
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.profiler import ProfilerActivity, profile, record_function

import msa
from configs import ACTIVATIONS, Config, Stage, describe, from_dict, load_config, stage_steps, to_dict
from data import Batch, Loader, Stream, TokenFile, find_dataset
from model import (
    IGNORE,
    Transformer,
    checkpoints,
    count_parameters,
    is_proxy,
    load_checkpoint,
    load_qwen3,
    load_run,
    load_weights,
)

PEAK_TFLOPS = {  # dense bf16, of the data sheets; a GPU that is not here has no MFU
    "GH200": 989,
    "H200": 989,
    "H100": 989,
    "B200": 2250,
    "B300": 2250,
    "A100": 312,
    "L40S": 362,
    "RTX 4090": 165,
}
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
KINDS = ("skipped", "train", "val", "proxy")  # of records, in the order in which a step writes them
CGROUP = Path("/sys/fs/cgroup")  # what limits a container
KEPT_CHECKPOINTS = 3  # checkpoint.pt and those before it
RANK_TIMEOUT = 600  # seconds that the ranks wait for one of them: more than a step, a save, a compilation
SILENCE = 20  # seconds without a beat after which a rank is gone; torchrun kills the others after 30
WANDB_TIMEOUT = 60  # seconds that the end of a run waits for wandb
# What a resumed run may change: nothing here moves a weight.
FREE_FIELDS = {
    *("out_dir", "dataset", "device", "compile", "init_from", "dry_run", "curves", "retrieval_sets"),
    *("stages", "stage_steps", "attention", "micro_batch_tokens", "max_skipped_steps", "activations"),
    *("memory_limit_gib", "row_chunk", "loss_chunk", "log_interval", "layer_interval", "eval_interval"),
    *("kl_interval", "kl_rows", "checkpoint_interval", "profile", "wandb", "wandb_project", "wandb_name"),
}


class RunError(RuntimeError):
    """The run cannot go on, on any rank; the message says why, what is left of it and what to do."""


def tell(text: str, error: bool = False) -> None:
    """Prints to stdout or stderr. Where that fails (a full disk, a reader or a terminal that is gone) nothing
    ends by it: the stream is /dev/null from then on, or the flush at exit would change the exit code."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError as why:
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
        if not error:
            tell(f"stdout can't be written: {why}; the run goes on, and prints no more there", error=True)


# ---- ranks and devices ------------------------------------------------------------------------------


class Watch:
    """Names the rank that the others wait for: every rank beats into the store, with the place it is at.

    A collective itself does not know whom it waits for, and over NCCL it may wait for ever. Time is counted
    in beats of one's own, so that processes that were all suspended don't take each other for dead.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.count = 0  # of the beats
        self.place, self.doing = 0, "the start"  # the count of `at` is alike on all ranks
        self.last_checkpoint = "no checkpoint yet"
        self.left, self.ending = threading.Event(), threading.Lock()
        self.beat()

    def start(self) -> None:
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def at(self, doing: str) -> None:
        self.place, self.doing = self.place + 1, doing

    def beat(self) -> None:
        self.count += 1
        self.store.set(f"rank{self.rank}", f"{self.count} {self.place}")

    def beats(self) -> list[list[str]]:
        """[count, place] of every rank; [] of one that left in good order."""
        return [v.decode().split() for v in self.store.multi_get([f"rank{r}" for r in range(self.size)])]

    def watch(self) -> None:
        neighbour = f"rank{(self.rank + 1) % self.size}"  # each its own: the store has little to do
        heard, place, since_heard, since_moved = b"", 0, 0, 0
        try:
            while not self.left.wait(1.0):
                self.beat()
                now = self.store.get(neighbour)
                since_heard = since_heard + 1 if now == heard and now else 0
                since_moved = since_moved + 1 if self.place == place else 0
                heard, place = now, self.place
                if self.store.check(["failed"]):
                    self.end(None)
                if since_heard >= SILENCE or since_moved >= RANK_TIMEOUT:
                    self.end(self.explain(self.silent()))
        except RuntimeError as error:  # the store's
            if not self.left.is_set():
                self.end(self.orphaned(error))

    def blame(self) -> str | None:
        """Which rank is gone; None if all are there."""
        try:
            silent = self.silent()
            return self.explain(silent) if silent else None
        except RuntimeError as error:
            return self.orphaned(error)

    def silent(self) -> list[int]:
        """The ranks that do not beat."""
        before = self.beats()
        for _ in range(4):  # here the beats may come from this very thread
            time.sleep(1.0)
            self.beat()
        return [r for r, (a, b) in enumerate(zip(before, self.beats(), strict=True)) if a and a == b]

    def explain(self, silent: list[int]) -> str:
        """Which ranks the others wait for: those that are silent, or else those that came least far."""
        ranks, what = silent, "gave no sign of life: it was killed, or its machine hangs"
        if not ranks:
            places = [int(beat[1]) if beat else math.inf for beat in self.beats()]
            ranks = [r for r, place in enumerate(places) if place == min(places)]
            what = f"did not move for {RANK_TIMEOUT} s"
        if len(ranks) == self.size:
            what += ", and all are at the same place: look at the network between them, and at their GPUs"
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self.size}"
        return f"{names} {what}; rank {self.rank} was at {self.doing}; {self.hint()}"

    def orphaned(self, error: RuntimeError) -> str:
        why = str(error).partition("\n")[0]
        return f"torchrun or rank 0, which coordinates the ranks, is gone ({why}); {self.hint()}"

    def hint(self) -> str:
        return f"{self.last_checkpoint}; the same command continues from there"

    def leave(self, failed: bool) -> None:
        """The end of this rank; where it failed, the others are to end too."""
        self.left.set()
        self.thread.join()
        with contextlib.suppress(RuntimeError):  # the store may be gone before us
            self.store.set(f"rank{self.rank}", "")
            if failed:
                self.store.set("failed", "")

    def end(self, message: str | None) -> None:
        """Of the process, whatever its main thread waits for; the first rank to find out says why."""
        self.ending.acquire()  # two threads may find out
        with contextlib.suppress(RuntimeError):
            if message and self.store.add("said", 1) > 1:
                message = None
            self.store.set("failed", "")
        if message:
            tell(f"error: {message}", error=True)
        if self.rank == 0:
            time.sleep(2)  # with the store ends what the others learn from that somebody has said why
        os._exit(1)


@dataclasses.dataclass
class World:
    rank: int
    size: int
    device: torch.device
    watch: Watch | None = None
    doing: str = "the start"
    lock: BinaryIO | None = None  # of rank 0 on out_dir; closing it, or the end of the process, frees it

    def say(self, text: str) -> None:
        if self.rank == 0:
            tell(text)

    def at(self, doing: str) -> None:
        """Notes what all ranks do next, for the message if that fails, or if one of them doesn't."""
        self.doing = doing
        if self.watch is not None:
            self.watch.at(doing)

    def sum(self, x: Tensor) -> Tensor:
        """All-reduced in place over the ranks."""
        if self.size > 1:
            dist.all_reduce(x)
        return x


@contextlib.contextmanager
def blocked(*numbers: int) -> Iterator[None]:
    """Signals wait, in this thread and in the processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def join_world(config: Config) -> World:
    """One process, or those that torchrun started: NCCL between GPUs, gloo between CPUs."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no GPU; use --device=cpu or mend the driver")
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        gpus = torch.cuda.device_count()
        if device.index >= gpus:
            raise ValueError(
                f"torchrun's nproc_per_node: process {device.index + 1} of this node has no GPU, for torch "
                f"sees {gpus}; start at most {gpus} a node (CUDA_VISIBLE_DEVICES may hide some)"
            )
        torch.cuda.set_device(device)
    watch = None
    if size > 1:
        store, rank, size = next(dist.rendezvous("env://"))
        watch = Watch(dist.PrefixStore("watch", store.clone()), rank, size)  # a connection of its own
        if not dist.is_initialized():
            backend = "nccl" if kind == "cuda" else "gloo"
            timeout = timedelta(seconds=RANK_TIMEOUT + 60)  # later than the watch, which knows more
            store = dist.PrefixStore("group", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        watch.start()
    return World(rank, size, device, watch)


def check_agreement(world: World, facts: dict[str, object]) -> None:
    """ValueError, on every rank, where the ranks would not train the same run."""
    if world.size == 1:
        return
    everyone: list[dict[str, object]] = [{}] * world.size
    dist.all_gather_object(everyone, facts)
    wrong = [
        f"{name} is {value!r} on rank 0, {theirs.get(name)!r} on rank {rank}"
        for rank, theirs in enumerate(everyone)
        for name, value in everyone[0].items()
        if theirs.get(name) != value
    ]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(
            f"the ranks disagree: {'; '.join(wrong[:8])}{more}. Give all of them the same command, config "
            "file, data and out_dir"
        )


def lock_folder(config: Config, world: World) -> None:
    """ValueError, on every rank, where another process trains in out_dir and each would spoil the other's."""
    busy = [""]
    if world.rank == 0:
        path = Path(config.out_dir) / "lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        world.lock = file = open(path, "r+b", buffering=0)  # over NFS a lock wants a file open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):  # it is for people; a full disk may still be read from
                file.truncate(file.write(f"pid {os.getpid()} on {socket.gethostname()}\n".encode()))
        except BlockingIOError:
            holder = file.read(200).decode(errors="replace").strip()
            busy = [
                f"out_dir: another process ({holder or 'unknown'}) trains in {config.out_dir}; wait for it, "
                "or give another --out_dir"
            ]
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            world.say(f"{path}: {error.strerror}; make sure that no other run has this out_dir")
    if world.size > 1:
        dist.broadcast_object_list(busy, src=0)
    if busy[0]:
        raise ValueError(busy[0])


def compute_dtype(config: Config, world: World) -> tuple[torch.dtype, str]:
    if config.dtype != "auto":
        return getattr(torch, config.dtype), "as the config says"
    if world.device.type == "cpu":
        return torch.float32, "on a CPU"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, "the GPU has it"
    return torch.float32, "the GPU has no bfloat16"


def compiles_rows(config: Config, world: World) -> tuple[bool, str]:
    if config.compile is not None:
        return config.compile, "as the config says"
    return world.device.type == "cuda", f"on {world.device.type}"


def shard(model: Transformer, world: World, dtype: torch.dtype) -> None:
    """FSDP2, layer by layer; gradients are summed over ranks, since each loss is a share of a global mean."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = dist.device_mesh.init_device_mesh(world.device.type, (world.size,))
    for module in [*model.model["layers"], model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def norm_of(tensors: list[Tensor], device: torch.device) -> Tensor:
    """2-norm over all of them, 0-dim."""
    if not tensors:
        return torch.zeros((), device=device)
    return full(torch.nn.utils.get_total_norm(tensors)).float()


# ---- schedule ---------------------------------------------------------------------------------------


class Schedule:
    """Which stage a step belongs to, and its learning rate."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.steps = stage_steps(config)
        self.ends = [sum(self.steps[: i + 1]) for i in range(len(self.steps))]
        self.total = self.ends[-1]

    def stage_of(self, step: int) -> int:
        return bisect.bisect_right(self.ends, step)

    def lr_share(self, step: int) -> float:
        """Share of the peak learning rate in step `step` (from 0)."""
        c = self.config
        tokens, total = step * c.tokens_per_step, self.total * c.tokens_per_step
        if tokens < c.lr_warmup_tokens:
            return min(1.0, (tokens + c.tokens_per_step) / c.lr_warmup_tokens)
        if c.schedule == "cosine":
            done = (tokens - c.lr_warmup_tokens) / max(1, total - c.lr_warmup_tokens)
            return c.lr_min_share + (1 - c.lr_min_share) * (1 + math.cos(math.pi * done)) / 2
        decay = c.lr_decay_share * total
        left = (total - tokens) / decay if decay else 1.0
        return c.lr_min_share + (1 - c.lr_min_share) * min(1.0, left)


def visible_pairs(batch: Batch, config: Config) -> tuple[int, int]:
    """(query, key) pairs of a rank's sequences: all that are visible, and those in selected blocks."""
    length, block = batch.tokens.shape[1], config.block_size
    place = np.arange(length)[None]
    if batch.doc_start_block is not None:
        place = place - np.repeat(batch.doc_start_block.numpy(), block, axis=1) * block
    seen = place + 1
    selected = np.minimum(seen, config.top_k - block + place % block + 1)
    share = batch.tokens.numel() // seen.size
    return int(seen.sum()) * share, int(selected.sum()) * share


def step_flops(model: Transformer, batch: Batch, stage: Stage) -> float:
    """FLOPs of a rank's forward and backward that the mathematics asks for; recomputing is not counted.

    Matrices: 2 a weight and token forward and 4 backward, 2 of the proxy, whose input has no gradient. A main
    pair: 4 D forward, 2.5 times that backward. A proxy pair: 2 D for the scores that select, 2 D for those
    that are normalised and 6 D backward. A frozen backbone goes forward only.
    """
    c = model.config
    proxy_weights = weights = 0
    for name, p in model.named_parameters():
        if p.dim() == 2 and is_proxy(name):
            proxy_weights += p.numel()
        elif p.dim() == 2 and "embed_tokens" not in name:
            weights += p.numel()
    weights += c.vocab_size * c.d_model if c.tie_embeddings else 0
    dense_pairs, sparse_pairs = visible_pairs(batch, c)
    with_proxy = c.n_layer - c.dense_layers if stage.attention != "dense" else 0
    main_pairs = dense_pairs if stage.attention == "warmup" else sparse_pairs
    a_weight, a_pair = (2.0, 4.0) if stage.freeze_backbone else (6.0, 14.0)
    total = (a_weight * weights + (4.0 * proxy_weights if with_proxy else 0.0)) * batch.tokens.numel()
    pairs = dense_pairs * (c.n_layer - with_proxy) + main_pairs * with_proxy
    total += a_pair * c.head_dim * c.n_head * pairs
    scored = dense_pairs if stage.attention == "sparse" else 0
    return total + c.head_dim * c.n_proxy_head * with_proxy * (2.0 * scored + 8.0 * main_pairs)


# ---- memory -----------------------------------------------------------------------------------------


class MemoryPlan(NamedTuple):
    """What a rank's step is predicted to take, in GiB."""

    activations: str  # see Transformer.forward
    tokens: int  # of a forward
    states: float  # weights, gradients and moments
    kept: float  # by layers, for backward
    work: float  # while a layer, or the loss, goes backward: all that is alive beside those two
    host: float  # layer inputs in pinned host memory

    @property
    def total(self) -> float:
        return self.states + self.kept + self.work

    def __str__(self) -> str:
        host = f", {self.host:.1f} GiB of host memory" if self.host else ""
        return (
            f"{self.total:.1f} GiB for {self.tokens:,} tokens a forward: {self.states:.1f} of weights, "
            f"gradients and moments, {self.kept:.1f} that layers keep for backward, {self.work:.1f} in which "
            f"one of them works{host}"
        )


def plan_memory(
    config: Config, world: World, stage: Stage, activations: str, dtype: torch.dtype, compiles: bool
) -> MemoryPlan:
    """Of one step in `stage`, where layers keep `activations`; counted from the tensors that there are."""
    c, size = config, dtype.itemsize
    tokens = forward_tokens(c, stage, world.size)
    params, layer_params = count_parameters(c)
    proxy = stage.attention != "dense"
    main_heads = c.n_head + 2 * c.n_kv_head
    proxy_heads = (c.n_proxy_head + c.n_proxy_kv_head) if proxy else 0
    # Bytes a token and layer.
    x, q = c.d_model * size, c.n_head * c.head_dim * size
    heads = (main_heads + proxy_heads) * c.head_dim * size
    raw = heads - c.n_kv_head * c.head_dim * size  # before their norms; v has none
    lse = 4 * (c.n_head + (c.n_proxy_head if proxy else 0))
    selection = 4 * c.n_proxy_head * (c.top_k // c.block_size) if stage.attention == "sparse" else 0
    mlp = c.d_mlp * size
    kept = {"offload": selection, "input": x + selection, "attention": x + heads + q + lse + selection}
    kept["all"] = kept["attention"] + 3 * x + raw + 3 * mlp
    if not compiles:  # what fusing spares: norms and RoPE in fp32
        kept["all"] += 4 * (4 * c.d_model + (2 * raw // size))
    of_layers = tokens * kept[activations] * c.n_layer
    chunks = -(-tokens // c.row_chunk)
    if activations == "all" and dtype != torch.float32:  # each chunk's weights, cast
        of_layers += chunks * size * layer_params
    # A layer goes backward: gradients of its output and input, of attention's output and inputs, and what it
    # computes again; beside it the chunk in hand.
    again = heads + q + lse if activations in ("input", "offload") else 0
    layer = tokens * (3 * x + q + heads + again)
    layer += msa.backward_workspace(
        batch=tokens // stage.seq_len,
        seq_len=stage.seq_len,
        heads=c.n_head,
        kv_heads=c.n_kv_head,
        proxy_heads=c.n_proxy_head if proxy else None,
        top_k=c.top_k if stage.attention == "sparse" else None,
        device=world.device,
        dtype=dtype,
        head_dim=c.head_dim,
        block_size=c.block_size,
    )
    rows = min(tokens, c.row_chunk)
    in_hand = rows * (2 * x + raw + 6 * mlp) if activations != "all" else 3 * rows * mlp
    loss = tokens * 2 * x + min(tokens, c.loss_chunk) * c.vocab_size * (4 * 3 + 2 * size)
    host = 0
    if activations == "offload":
        layer += 3 * tokens * x  # the last layer's input stays, and two are on their way
        # Pinned memory comes in powers of two; a checkpoint brings weights and moments to the host.
        host = 2 ** math.ceil(math.log2(tokens * x)) * (c.n_layer - 1) + 12 * params
    rope = tokens * 4 * c.head_dim
    states = 16 * params / world.size
    if world.size > 1:
        # FSDP: the root's weights whole, and two layers', with their gradients; where a step has several
        # micro-batches, the sum of all gradients too, in fp32, until the last one scatters it.
        states += 2 * size * (params - layer_params + 2 * layer_params / c.n_layer)
        states += 4 * params if c.tokens_per_step // world.size > tokens else 0
    return MemoryPlan(
        activations,
        tokens,
        states=states / 2**30,
        kept=of_layers / 2**30,
        work=(rope + max(layer + in_hand, loss)) / 2**30,
        host=host / 2**30,
    )


def forward_tokens(config: Config, stage: Stage, ranks: int) -> int:
    """Tokens of a forward: as many of a rank's sequences as micro_batch_tokens holds, at least one."""
    most = min(config.micro_batch_tokens or 16384, config.tokens_per_step // ranks)
    return max(1, most // stage.seq_len) * stage.seq_len


def host_memory_left() -> int:
    """Bytes that this process may still take: what the system has, or what its container may."""
    left = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, StopIteration):  # this counts the page cache too
        lines = Path("/proc/meminfo").read_text().splitlines()
        left = [int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024]
    for most, taken, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such cgroup, or "max"
            limit, used = (int((CGROUP / name).read_text()) for name in (most, taken))
            counts = dict(line.split() for line in (CGROUP / stat).read_text().splitlines())
            cached = sum(int(counts.get(f"{state}_file", 0)) for state in ("active", "inactive"))
            left.append(max(0, limit - used + cached))  # what was read from files makes room
    return min(left)


def memory_there_is(config: Config, world: World) -> tuple[float, float]:
    """GiB that a step may take: of the device (of several ranks the smallest), and of the host, pinned."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = host = host_memory_left() / local / 2**30
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        device = (free + torch.cuda.memory_reserved(world.device)) / 2**30
        if config.memory_limit_gib is not None:
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, config.memory_limit_gib * 2**30 / total), world.device
            )
    if config.memory_limit_gib is not None:
        device = min(device, config.memory_limit_gib)
    least = torch.tensor([device, host], device=world.device)
    if world.size > 1:
        dist.all_reduce(least, dist.ReduceOp.MIN)
    return tuple(least.tolist())


def choose_activations(
    config: Config, world: World, index: int, there: tuple[float, float], dtype: torch.dtype, compiles: bool
) -> MemoryPlan:
    """What the layers keep for backward in stage `index`; says why. ValueError where no choice fits.
    there: GiB of the device and of the host, see `memory_there_is`."""
    stage, (device, host) = config.stages[index], there
    auto = config.activations == "auto"
    options = (config.activations,)
    if auto:  # a CPU has no other memory to go to
        options = ACTIVATIONS if world.device.type == "cuda" else ACTIVATIONS[:-1]
    plans = [plan_memory(config, world, stage, kept, dtype, compiles) for kept in options]
    # The allocator's blocks leave gaps, and the host runs other things.
    fitting = [plan for plan in plans if plan.total <= 0.95 * device and plan.host <= 0.9 * host]
    if not fitting:
        pinned = f" and {host:.1f} GiB of host memory" if plans[-1].host else ""
        raise ValueError(
            f"stages[{index}] ({stage.attention}, {stage.seq_len:,} tokens a sequence) does not fit: with "
            f"activations {options[-1]!r} it is predicted to take {plans[-1]}; there are {device:.1f} GiB, "
            f"5% of them for gaps{pinned}. Less is needed with "
            f"{needs_less(config, world, stage, plans[-1], dtype, compiles)}"
        )
    best = fitting[0]
    why = "as the config says"
    if auto:
        why = f"the first that fits 95% of {device:.1f} GiB"
        if best is not plans[0]:
            before = plans[plans.index(best) - 1]
            why += f", {before.activations!r} would take {before.total:.1f}"
    world.say(f"stage {index} keeps {best.activations!r} for backward ({why}); predicted: {best}")
    return best


def needs_less(
    config: Config, world: World, stage: Stage, plan: MemoryPlan, dtype: torch.dtype, compiles: bool
) -> str:
    """The settings with which `plan` would take less, and how much then."""
    c, options = config, []
    if plan.tokens > stage.seq_len:
        options.append(("micro_batch_tokens", max(stage.seq_len, plan.tokens // 2)))
    later = ACTIVATIONS[ACTIVATIONS.index(plan.activations) + 1 :]
    options += [("activations", kept) for kept in later if kept != "offload" or world.device.type == "cuda"]
    options += [("row_chunk", min(plan.tokens, c.row_chunk) // 2), ("loss_chunk", c.loss_chunk // 4)]
    found = []
    for name, value in options:
        if value and (name != "row_chunk" or value >= 1024):
            changed = dataclasses.replace(c, **{name: value})
            kept = value if name == "activations" else plan.activations
            less = plan_memory(changed, world, stage, kept, dtype, compiles)
            if less.total < 0.98 * plan.total:
                found.append(f"--{name}={value} ({less.total:.1f} GiB)")
    return ", ".join([*found, "more ranks, or a shorter seq_len"])


# ---- optimizers -------------------------------------------------------------------------------------


def make_optimizers(model: Transformer, config: Config) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the backbone's matrices. Every group has a `peak` learning rate."""
    groups: dict[tuple[bool, bool, bool], list[Tensor]] = {}
    for name, param in model.named_parameters():
        matrix = param.dim() == 2
        embedding = "embed_tokens" in name or "lm_head" in name
        muon = config.optimizer == "muon" and matrix and not embedding and not is_proxy(name)
        groups.setdefault((muon, is_proxy(name), matrix), []).append(param)
    optimizers: list[torch.optim.Optimizer] = []
    for wants_muon in (False, True):
        own = [
            {
                "params": params,
                "peak": config.proxy_lr if proxy else config.lr,
                "weight_decay": config.weight_decay if matrix else 0.0,
            }
            for (muon, proxy, matrix), params in groups.items()
            if muon == wants_muon
        ]
        if not own:
            continue
        if wants_muon:
            # Updates as large as AdamW's, so that both share one learning rate.
            optimizer = torch.optim.Muon(
                own, lr=config.lr, momentum=config.muon_momentum, adjust_lr_fn="match_rms_adamw"
            )
        else:
            optimizer = torch.optim.AdamW(own, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
        optimizers.append(optimizer)
    return optimizers


# ---- checkpoints: whole tensors by name, so that any world size reads them -----------------------------


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """A kill at any moment, or a cut of power, leaves either the old file or the new one."""
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)  # its space may be what others lack
        raise OSError(error.errno, error.strerror, str(path)) from error
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def write_tensors(state: dict, file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:  # the zip writer's, over the error that matters
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def keep_older(out_dir: Path, step: int) -> None:
    """Gives checkpoint.pt, of `step`, a name under which it outlives the next."""
    newest, kept = out_dir / "checkpoint.pt", out_dir / f"checkpoint_{step}.pt"
    if not newest.exists() or kept.exists():
        return
    try:
        os.link(newest, kept)
    except OSError:  # a file system without hard links: for a moment only `kept` is there, which is enough
        os.replace(newest, kept)


def drop_oldest(out_dir: Path, step: int) -> None:
    """Leaves KEPT_CHECKPOINTS of them, the last of `step`; later ones were damaged, or are given up."""
    steps = sorted(int(p.stem.removeprefix("checkpoint_")) for p in checkpoints(out_dir) if "_" in p.stem)
    earlier = [s for s in steps if s < step]
    for s in [*earlier[: max(0, len(earlier) - KEPT_CHECKPOINTS + 1)], *(s for s in steps if s > step)]:
        (out_dir / f"checkpoint_{s}.pt").unlink()


def gather_state(
    model: Transformer, optimizers: list[torch.optim.Optimizer], keep: bool
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """(parameters, optimizer state by parameter name) on the CPU; every rank calls, `keep` receives."""
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, param in model.named_parameters():
        whole = full(param.detach())
        if keep:
            weights[name] = whole.cpu()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(param, {}).items():
                whole = full(value)
                if keep:
                    moments.setdefault(name, {})[key] = whole.cpu()
    return weights, moments


def like(param: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, placed as `param` is."""
    value = value.to(param.device)
    if isinstance(param, DTensor) and value.shape == param.shape:
        return distribute_tensor(value, param.device_mesh, param.placements)
    return value


def forget(mapped: Tensor) -> None:
    """Gives back the pages of a memory-mapped tensor: else a resume would need a checkpoint's size more."""
    begin = -(-mapped.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = mapped.data_ptr() + mapped.nbytes - begin
    if size > 0 and sys.platform == "linux":
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(size // mmap.PAGESIZE * mmap.PAGESIZE), mmap.MADV_DONTNEED
        )


def restore_state(model: Transformer, optimizers: list[torch.optim.Optimizer], saved: dict) -> None:
    """Copies from a memory-mapped checkpoint."""
    owner = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
    for name, param in model.named_parameters():
        with torch.no_grad():
            param.copy_(like(param, saved["model"][name]))
        forget(saved["model"][name])
        if name in saved["optimizer"]:  # a proxy that never learned has none
            values = saved["optimizer"][name]
            owner[param].state[param] = {key: like(param, value.clone()) for key, value in values.items()}
            for value in values.values():
                forget(value)


def check_state(saved: dict, config: Config, model: Transformer) -> None:
    """ValueError where a checkpoint lacks what a run continues from, or has other tensors than the model."""
    kept = Path(config.out_dir) / f"checkpoint_{saved['step']}.pt"
    file = kept if kept.exists() else kept.with_name("checkpoint.pt")
    rng = torch.get_rng_state()
    kinds = {"model": dict, "optimizer": dict, "rng": Tensor, "skipped": int, "skipped_in_a_row": int}
    wrong = [f"{key} is missing" for key in kinds if key not in saved]
    wrong += [
        f"{k} is no {t.__name__}" for k, t in kinds.items() if k in saved and not isinstance(saved[k], t)
    ]
    if not wrong:
        if (saved["rng"].dtype, saved["rng"].shape) != (rng.dtype, rng.shape):
            wrong.append("rng is no state of torch's generator")
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        found = {name: tuple(w.shape) for name, w in saved["model"].items()}
        for name in shapes | found:
            if found.get(name) != shapes.get(name):
                is_now = found.get(name, "missing")
                wrong.append(f"{name} is {is_now}, the model has {shapes.get(name, 'no such tensor')}")
        adamw, muon = {"step": (), "exp_avg": None, "exp_avg_sq": None}, {"momentum_buffer": None}
        for name, values in saved["optimizer"].items():  # a proxy that never learned has none
            have = {key: tuple(v.shape) for key, v in values.items()}
            if all(
                have != {k: shapes.get(name) if s is None else s for k, s in m.items()} for m in (adamw, muon)
            ):
                wrong.append(f"the optimizer's state of {name} is {have}")
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise ValueError(
            f"checkpoint {file} can't be continued: {'; '.join(wrong[:4])}{more}. Put a whole copy in its "
            "place, delete it to continue from the one before, or start another run from its weights with "
            "--init_from"
        )


def check_resume(saved: dict, config: Config, schedule: Schedule, data: dict) -> None:
    """ValueError where it would not be the same run: lengthening the last stage or appending is fine."""
    before, now = saved["config"], to_dict(config)
    wrong = [
        f"{name} was {before[name]!r}, is {now[name]!r}"
        for name in now
        if name not in FREE_FIELDS and name in before and before[name] != now[name]
    ]
    old = from_dict(before)
    old_steps, reached = stage_steps(old), saved["stage"]
    for i in range(reached + 1):
        if i >= len(config.stages):
            wrong.append(f"stages[{i}] is gone")
            continue
        a = dataclasses.replace(old.stages[i], steps=None, tokens=None)
        b = dataclasses.replace(config.stages[i], steps=None, tokens=None)
        if a != b:
            wrong.append(f"stages[{i}] was {a}, is {b}")
        if i < reached and old_steps[i] != schedule.steps[i]:
            wrong.append(f"stages[{i}] was {old_steps[i]} steps long, is {schedule.steps[i]}")
    if saved["step"] > schedule.total:
        wrong.append(f"{saved['step']} steps are done, the stages have {schedule.total}")
    elif reached < len(config.stages) and saved["step"] > schedule.ends[reached]:
        wrong.append(f"stages[{reached}] ends at step {schedule.ends[reached]}, {saved['step']} are done")
    wrong += [
        f"the data's {k} was {saved['data'].get(k)}, is {data[k]}"
        for k in data
        if data[k] != saved["data"].get(k)
    ]
    if wrong:
        raise ValueError(
            f"out_dir: {config.out_dir} holds another run: " + "; ".join(wrong) + ". Take another --out_dir, "
            "delete this one, or start from its weights with --init_from"
        )


# ---- logging ----------------------------------------------------------------------------------------


class Log:
    """metrics.jsonl always, wandb where it is asked for; rank 0 alone writes, and no failure ends the run."""

    def __init__(self, config: Config, world: World, resumed_at: int) -> None:
        self.path = Path(config.out_dir) / "metrics.jsonl"
        self.world, self.wandb = world, None
        self.waiting: list[str] = []  # lines that could not be written yet
        self.failing = False
        if world.rank != 0:
            return
        before = read_metrics(self.path) if self.path.exists() else []
        kept = [r for r in before if still_holds(r, resumed_at)]
        text = "".join(json.dumps(r) + "\n" for r in kept).encode()
        write_atomically(self.path, lambda file: file.write(text))
        self.size = len(text)  # of the whole lines
        if config.wandb:
            self.wandb = Wandb(config, world, kept, handed=max(map(wandb_step, before), default=-1))

    def write(self, record: dict) -> None:
        if self.world.rank != 0:
            return
        self.waiting.append(json.dumps({k: finite(v) for k, v in record.items()}) + "\n")
        self.flush()
        if self.wandb is not None:
            self.wandb.log(record)

    def flush(self, sync: bool = False) -> None:
        """Writes what waits; opened each time, for a folder that went away says nothing to an open file."""
        if self.world.rank != 0:
            return
        text = "".join(self.waiting).encode()
        try:
            with open(self.path, "ab") as file:
                if file.tell() > self.size:
                    file.truncate(self.size)  # a line that a full disk cut short
                file.write(text)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
        except OSError as error:
            if not self.failing:
                self.world.say(
                    f"{self.path} can't be written: {error}; its lines wait in memory and are tried again"
                )
            self.failing = True
            return
        if self.failing:
            self.world.say(f"{self.path} is written again, with {len(self.waiting)} lines that waited")
        self.size += len(text)
        self.waiting, self.failing = [], False

    def close(self) -> None:
        if self.waiting:
            self.flush()
        if self.waiting:
            self.world.say(f"{self.path} lacks up to {len(self.waiting)} of its last lines")
        if self.wandb is not None:
            self.wandb.close()


def finite(value: object) -> object:
    """JSON has no NaN: a figure that does not exist is null."""
    if isinstance(value, list):
        return [finite(v) for v in value]
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics.jsonl; a line that a kill cut short, or that is no record, is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [r for r in records if is_record(r)]


def is_record(x: object) -> bool:
    numbers = isinstance(x, dict) and all(isinstance(x.get(key), int) for key in ("step", "tokens"))
    return numbers and x.get("kind") in KINDS


def still_holds(record: dict, step: int) -> bool:
    """After resuming at `step`: what lies past it will come again, and so will the evaluation due there."""
    return record["step"] < step or (record["step"] == step and record["kind"] in ("skipped", "train"))


def wandb_step(record: dict) -> int:
    """A step of wandb's own, which takes no row twice and none below its last."""
    return len(KINDS) * record["step"] + KINDS.index(record["kind"])


class Wandb:
    """Hands records to wandb in a daemon thread: however it fails, hangs or takes its time, the run goes on.

    kept: the records from before a resume. handed: the wandb_step of the last record that an earlier start
    had, kept or not. Rows that wandb has are not sent again, those that it lacks are.
    """

    def __init__(self, config: Config, world: World, kept: list[dict], handed: int) -> None:
        self.config, self.world = config, world
        self.run, self.sent, self.failures = None, -1, 0
        self.thread = ThreadPool(1)
        self.do(self.start, kept, handed)

    def do(self, work: Callable[..., object], *args: object):
        return self.thread.apply_async(work, args, error_callback=self.failed)

    def failed(self, error: BaseException) -> None:
        self.failures += 1
        if self.failures == 1:
            self.world.say(
                f"wandb: {type(error).__name__}: {' '.join(str(error).split())}; the run goes on, and "
                "metrics.jsonl has what wandb lacks"
            )

    def start(self, kept: list[dict], handed: int) -> None:
        import wandb

        config = self.config
        id_file = Path(config.out_dir) / "wandb_id"  # the id, and how far offline starts came
        known = id_file.read_text(errors="replace") if id_file.exists() else ""
        if match := re.fullmatch(r"([\w-]+)(?: (-?\d+))?\s*", known, re.ASCII):
            name, self.sent = match[1], max(handed, int(match[2] or -1))
        else:
            name = secrets.token_hex(4)
        write_atomically(id_file, lambda file: file.write(f"{name} {self.sent}\n".encode()))
        mode, why = os.environ.get("WANDB_MODE"), "WANDB_MODE says so"
        if mode is None:
            mode, why = "online", "a key is there"
            if not wandb.login(prompt=False, verify=False):
                mode = "offline"
                why = "there is no API key; `wandb login` and `wandb sync` bring it online later"
        options = {
            "project": config.wandb_project,
            "name": config.wandb_name or Path(config.out_dir).name,
            "id": name,
            "resume": "allow",
            "dir": config.out_dir,
            "config": to_dict(config),
            "settings": wandb.Settings(init_timeout=30, finish_timeout=WANDB_TIMEOUT),
        }
        try:
            self.run = wandb.init(mode=mode, **options)
        except wandb.errors.CommError as error:
            mode, why = "offline", f"no network: {error}"
            wandb.teardown()  # or the id counts as in use
            self.run = wandb.init(mode=mode, **options)
        self.world.say(f"wandb: {mode} ({why})")
        self.run.define_metric("tokens")
        self.run.define_metric("*", step_metric="tokens")
        if mode == "online":
            self.sent = self.run.starting_step - 1  # what the server has
        for record in kept:
            self.send(record)

    def log(self, record: dict) -> None:
        self.do(self.send, record)

    def send(self, record: dict) -> None:
        if self.run is None or wandb_step(record) <= self.sent:
            return
        import wandb

        kind = record["kind"]
        flat = {"tokens": record["tokens"], "step": record["step"]}
        for key, value in record.items():
            if key == "by_layer":
                for name, rows in value.items():
                    flat[f"{kind}_layers/{name}"] = wandb.Image(heat_map(rows, name))
            elif isinstance(value, list):  # one figure a layer
                flat[f"{kind}_layers/{key}"] = wandb.Image(heat_map([[v] for v in value], key))
            elif isinstance(value, int | float) and key not in flat:
                flat[f"{kind}/{key}"] = value
        self.run.log(flat, step=wandb_step(record))

    def close(self) -> None:
        last = self.do(lambda: self.run and self.run.finish())
        last.wait(1.2 * WANDB_TIMEOUT)  # wandb itself gives up before
        if not last.ready():
            self.world.say(
                "wandb: it does not finish; `wandb sync` sends later what lies in the run's folder"
            )


def heat_map(rows: list[list[float]], title: str) -> np.ndarray:
    """A picture of layers by proxy heads, (height, width, 4) uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + 0.3 * len(rows[0]), 1.5 + 0.25 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.array(rows, dtype=float), aspect="auto")
    axes.set(title=title, xlabel="proxy head", ylabel="layer")
    figure.colorbar(image)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def draw_curves(out_dir: str | Path) -> Path:
    """curves.png from metrics.jsonl: loss, KL, recalls, length and speed over tokens; loss by position."""
    from matplotlib.figure import Figure

    path = Path(out_dir) / "metrics.jsonl"
    if not path.exists():
        raise ValueError(
            f"out_dir: {out_dir} holds no metrics.jsonl to draw; train first, or name another run"
        )
    records = read_metrics(path)

    def series(kind: str, key: str) -> tuple[list[float], list[float]]:
        points = [(r["tokens"], r[key]) for r in records if r["kind"] == kind and r.get(key) is not None]
        return [p[0] for p in points], [p[1] for p in points]

    figure = Figure(figsize=(11, 10), layout="constrained")
    (loss, kl), (recall, length), (position, speed) = figure.subplots(3, 2)
    for axes in (kl, recall, length, speed):
        axes.sharex(loss)
    loss.plot(*series("train", "loss"), lw=1, color="0.6", label="train")
    loss.plot(*series("val", "loss"), "o-", ms=3, label="validation, fixed: first length, dense")
    loss.plot(*series("val", "stage_loss"), "s-", ms=3, label="validation, the stage's own")
    loss.set(title="loss", ylabel="nats a token")
    kl.plot(*series("train", "kl"), lw=1, color="0.6", label="training step")
    kl.plot(*series("proxy", "kl_selected"), "o-", ms=3, label="validation, selected tokens")
    kl.plot(*series("proxy", "kl_full"), "s-", ms=3, label="validation, all tokens")
    kl.set(title="KL(attention || proxy), mean over layers and heads", ylabel="nats", yscale="log")
    recall.plot(*series("proxy", "block_recall"), "o-", ms=3, label="block recall")
    recall.plot(*series("proxy", "score_recall"), "s-", ms=3, label="score recall")
    recall.plot(*series("proxy", "score_best"), "--", lw=1, color="0.4", label="best possible score recall")
    recall.set(title="recalls of the selection", ylim=(None, 1.01))
    length.step(*series("train", "seq_len"), where="pre")
    length.set(title="sequence length", ylabel="tokens")
    length.set_yscale("log", base=2)
    speed.plot(*series("train", "tokens_per_second"), ".-", lw=1)
    speed.set(title="speed", ylabel="tokens a second", xlabel="tokens", ylim=(0, None))
    train = [r for r in records if r["kind"] == "train"]
    stages = {r["stage"]: f"{r['attention']} {r['seq_len']:,}" for r in train}
    for stage, last in {r["stage"]: r for r in records if r["kind"] == "val"}.items():
        prefix = "stage_loss_from_"
        points = sorted((int(k.removeprefix(prefix)), v) for k, v in last.items() if k.startswith(prefix))
        # A bucket ends where the next one, twice as far, begins.
        ends = [max(128, 2 * start) for start, _ in points]
        position.plot(ends, [v for _, v in points], ".-", lw=1, label=stages.get(stage, f"stage {stage}"))
    position.set(title="loss by position, at the end of each stage", ylabel="nats a token", xlabel="up to")
    position.set_xscale("log", base=2)
    pairs = zip(train, train[1:], strict=False)
    starts = [(a["tokens"], b) for a, b in pairs if a["stage"] != b["stage"]]
    for tokens, first in [*((0, r) for r in train[:1]), *starts]:
        for axes in (loss, kl, recall, length, speed):
            axes.axvline(tokens, color="0.85", lw=1, zorder=0)
        length.annotate(first["attention"], (tokens, first["seq_len"]), fontsize=8, va="bottom")
    for axes in (loss, kl, recall, position):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
        axes.grid(alpha=0.2)
    out = path.with_name("curves.png")
    write_atomically(out, lambda file: figure.savefig(file, dpi=110, format="png"))
    return out


def stage_table(out_dir: str | Path) -> str:
    """A line a stage from metrics.jsonl: speed (medians), memory (peaks, and as predicted), loss and KL."""
    records = read_metrics(Path(out_dir) / "metrics.jsonl")
    lines = [
        f"{'stage':>5} {'attention':>9} {'seq_len':>9} {'steps':>6} {'s/step':>7} {'tok/s':>9} {'mfu':>6} "
        f"{'keeps':>9} {'GiB':>6} {'predicted':>9} {'host GiB':>8} {'loss':>7} {'kl':>7}"
    ]
    train = [r for r in records if r["kind"] == "train"]
    for stage in sorted({r["stage"] for r in train}):
        own = [r for r in train if r["stage"] == stage]
        last, speeds = own[-1], [r["tokens_per_second"] for r in own if r["tokens_per_second"]]
        first_step = max((r["step"] for r in train if r["stage"] < stage), default=0)
        tokens = last["tokens"] // last["step"]  # a step

        def shown(x: float | None, form: str, width: int) -> str:
            return f"{'-' if x is None else format(x, form):>{width}}"

        speed = float(np.median(speeds)) if speeds else None
        mfus = [r["mfu"] for r in own if r["mfu"]]
        lines.append(
            f"{stage:5} {last['attention']:>9} {last['seq_len']:9,} {last['step'] - first_step:6,} "
            f"{shown(speed and tokens / speed, '.2f', 7)} {shown(speed, ',.0f', 9)} "
            f"{shown(float(np.median(mfus)) if mfus else None, '.1%', 6)} {last.get('activations', '-'):>9} "
            f"{max(r['peak_memory_gib'] for r in own):6.1f} "
            f"{shown(last.get('predicted_memory_gib'), '.1f', 9)} "
            f"{shown(last.get('host_memory_gib'), '.1f', 8)} "
            f"{shown(last['loss'], '.4f', 7)} {shown(last['kl'], '.4f', 7)}"
        )
    return "\n".join(lines)


# ---- the run ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def explained_folder() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"out_dir: {error}; mend the folder or free some space, or take another --out_dir"
        ) from error


class Trainer:
    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.schedule = Schedule(config)
        check_ranks(config, world)
        folder = find_dataset(config.dataset)
        self.train_file, self.val_file = TokenFile(folder / "train.bin"), TokenFile(folder / "val.bin")
        set_vocab(config, self.train_file)
        self.retrieval = {name: TokenFile(find_dataset(name) / "val.bin") for name in config.retrieval_sets}
        for name, file in self.retrieval.items():
            if file.tokenizer != self.train_file.tokenizer or file.label_mask is None:
                mark = "answers marked" if file.label_mask is not None else "no answers marked"
                raise ValueError(
                    f"retrieval_sets: {name} must have answers marked and the tokenizer "
                    f"{self.train_file.tokenizer!r}, has {mark} and {file.tokenizer!r}; "
                    "prepare it again, see data/passkey/prepare.py"
                )
        self.data = {
            "hash": self.train_file.hash,
            "val_hash": self.val_file.hash,
            "tokenizer": self.train_file.tokenizer,
            "eos": self.train_file.eos,
            "vocab_size": self.train_file.vocab_size,
        }
        files = (self.train_file, self.val_file, *self.retrieval.values())
        self.mapped = [(file.path, (m := mapping(file)), m.size()) for file in files]
        self.loader = self.loader_of(self.train_file, config.tokens_per_step)
        check_data(config, self.loader.stream, self.loader_of(self.val_file, config.tokens_per_step).stream)

        torch.manual_seed(config.seed)
        dtype, why = compute_dtype(config, world)
        self.model = Transformer(config)
        self.model.compute_dtype = dtype
        self.compiles, reason = compiles_rows(config, world)
        world.say(
            f"device {world.device} x {world.size} ranks; {str(dtype).removeprefix('torch.')} ({why}); "
            f"torch.compile {'on' if self.compiles else 'off'} ({reason})"
        )
        if self.compiles:
            self.model.compile_rows()
        self.step = 0
        if config.init_from is not None and not checkpoints(config.out_dir):
            self.load_initial(config.init_from)
        paths = ("out_dir", "dataset", "retrieval_sets")  # may differ from machine to machine
        facts = {name: value for name, value in to_dict(config).items() if name not in paths}
        facts |= {f"the data's {name}": value for name, value in self.data.items()}
        facts["the hashes of retrieval_sets"] = [file.hash for file in self.retrieval.values()]
        facts["torch's version"] = torch.__version__
        check_agreement(world, facts)
        with explained_folder():
            lock_folder(config, world)
        saved = load_checkpoint(config.out_dir)
        if saved is not None:
            check_resume(saved, config, self.schedule, self.data)
            check_state(saved, config, self.model)
        check_agreement(world, {"the step of the checkpoint": saved and saved["step"]})
        there = memory_there_is(config, world)
        self.plans = [
            choose_activations(config, world, i, there, dtype, self.compiles)
            for i in range(len(config.stages))
        ]
        self.activations = self.plans[0].activations  # of the stage in hand
        self.model.to(world.device)
        if world.size > 1:
            shard(self.model, world, dtype)
        self.backbone = [p for n, p in self.model.named_parameters() if not is_proxy(n)]
        self.proxy = [p for n, p in self.model.named_parameters() if is_proxy(n)]
        self.optimizers = make_optimizers(self.model, config)
        if saved is not None:
            restore_state(self.model, self.optimizers, saved)
            torch.set_rng_state(saved["rng"])
            self.step = saved["step"]
            world.say(f"continuing {config.out_dir} at step {self.step} of {self.schedule.total}")
        self.skipped_in_a_row = saved["skipped_in_a_row"] if saved else 0
        self.skipped = saved["skipped"] if saved else 0
        self.saved_step = self.step if saved else None
        del saved  # its pages are the file's
        layers = config.n_layer
        self.kl_probe = torch.zeros(layers, config.n_proxy_head, device=world.device, requires_grad=True)
        with explained_folder():
            if world.rank == 0:
                self.prepare_folder()
            self.log = Log(config, world, self.step)
        self.note_checkpoint()
        self.signal_here = self.stop_signal = 0  # what this process was sent, and what all ranks agreed on

    def prepare_folder(self) -> None:
        out_dir = Path(self.config.out_dir)
        out_dir.mkdir(parents=True, exist_ok=True)
        for name in ("checkpoint.pt", "config.json", "metrics.jsonl", "curves.png", "wandb_id"):
            (out_dir / f"{name}.new").unlink(missing_ok=True)  # what a kill left half-written
        if self.saved_step is not None:
            drop_oldest(out_dir, self.saved_step)  # or what it kept from being dropped
        text = json.dumps(to_dict(self.config), indent=2) + "\n"
        write_atomically(out_dir / "config.json", lambda file: file.write(text.encode()))

    def note_checkpoint(self) -> None:
        if self.world.watch is not None:
            self.world.watch.last_checkpoint = self.last_checkpoint()

    def last_checkpoint(self) -> str:
        if self.saved_step is None:
            return f"{self.config.out_dir} has no checkpoint yet"
        return f"the last checkpoint is that of step {self.saved_step} in {self.config.out_dir}"

    def remedy(self) -> str:
        source = "" if self.saved_step is None else f"--init_from={self.config.out_dir} and "
        return f"start another run with {source}a lower lr or proxy_lr"

    def loader_of(self, file: TokenFile, tokens: int) -> Loader:
        stream = Stream(file, seed=self.config.seed, block_size=self.config.block_size)
        return Loader(stream, tokens_per_step=tokens)

    def check_files(self) -> None:
        """ValueError where a data file changed its size: to read past its end would be a silent SIGBUS."""
        for path, mapped, size in self.mapped:
            if mapped.size() != size:
                raise ValueError(
                    f"dataset: {path} changed while it was read, from {size:,} bytes to {mapped.size():,}, "
                    f"seen at step {self.step + 1}; prepare it again as it was. {self.last_checkpoint()}; "
                    "the same command continues from there"
                )

    def load_initial(self, source: str) -> None:
        if checkpoints(source):
            state = load_run(source).state
        elif (Path(source) / "config.json").exists() and not (Path(source) / "metrics.jsonl").exists():
            state = load_qwen3(source, self.config)
        else:
            raise ValueError(
                f"init_from: {source} is neither a run (checkpoint.pt) nor a Qwen3 folder (config.json)"
            )
        missing = load_weights(self.model, state, source)
        new = f"; {len(missing)} proxy tensors start fresh" if missing else ""
        self.world.say(f"weights from {source}{new}")

    # -- one step --

    def micro_batch(self, stage: Stage) -> int:
        """Sequences a forward and rank."""
        return forward_tokens(self.config, stage, self.world.size) // stage.seq_len

    def few_tokens(self, stage: Stage) -> set[int]:
        """Of a forward, of less tokens, that is cut into chunks of the same shapes as those of the stage."""
        c = self.config
        share, whole = c.tokens_per_step // self.world.size, math.lcm(c.row_chunk, c.loss_chunk)
        tokens = forward_tokens(c, stage, self.world.size)
        both = {tokens, share % tokens} - {0}  # the last micro-batch of a step may be smaller
        return {n if n <= whole else whole + n % whole for n in both}

    def forward(self, batch: Batch, rows: slice, stage: Stage, **kwargs):
        device = self.world.device
        docs = None if batch.doc_start_block is None else batch.doc_start_block[rows].to(device)
        return self.model(
            batch.tokens[rows].to(device),
            batch.labels[rows].to(device),
            attention=stage.attention,
            rope_theta=stage.rope_theta,
            doc_start_block=docs,
            **kwargs,
        )

    def compiled(self) -> int:
        """Graphs and kernels that this process has compiled so far, or read from the disk."""
        kernels = sys.modules.get("msa.hopper.jit")
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if self.compiles else 0
        return graphs + (kernels.load.cache_info().misses if kernels is not None else 0)

    def warm_up(self) -> None:
        """Compiles all that the stages to come will run: a forward and backward of a chunk for each of their
        kinds, so that no step waits for it, and a fault shows now rather than after days."""
        c, world = self.config, self.world
        if not (self.compiles or world.device.type == "cuda"):
            return
        first = self.schedule.stage_of(self.step)
        kinds = {}
        for stage, plan in list(zip(c.stages, self.plans, strict=True))[first:]:
            for n in self.few_tokens(stage):
                kinds[stage.attention, stage.document_mask, plan.activations, n] = stage
        # A kind of a part is a recompilation to dynamo, which gives up after some that nobody asked for.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(kinds))
        world.at("the compilation")
        begin = time.perf_counter()
        # Schedulers send SIGTERM to every process, a terminal that closes SIGHUP: compile workers, which this
        # may start, would die of it, and we wait for them. They inherit what is blocked; the handler here
        # comes later.
        with blocked(signal.SIGTERM, signal.SIGHUP):
            for (attention, masked, activations, n), stage in kinds.items():
                tokens = torch.zeros(1, n, dtype=torch.long, device=world.device)
                blocks = -(-n // c.block_size)
                docs = torch.zeros(1, blocks, dtype=torch.int32, device=world.device) if masked else None
                out = self.model(
                    tokens,
                    tokens,
                    attention=attention,
                    activations=activations,
                    rope_theta=stage.rope_theta,
                    doc_start_block=docs,
                    kl_probe=self.kl_probe,
                )
                (out.nll.sum() + out.kl).backward()
                for optimizer in self.optimizers:
                    optimizer.zero_grad(set_to_none=True)
                self.kl_probe.grad = None
                del out
            with torch.no_grad(), self.evaluating():
                n = 4 * c.block_size
                tokens = torch.zeros(1, n, dtype=torch.long, device=world.device)
                if c.eval_interval:  # as `validate`, in every stage
                    docs = torch.zeros(1, 4, dtype=torch.int32, device=world.device)
                    self.model(tokens, tokens, attention="dense", doc_start_block=docs)
                if c.kl_interval and c.dense_layers < c.n_layer and any(k[0] != "dense" for k in kinds):
                    rows = torch.arange(1, device=world.device)  # as `inspect_proxy`: a kernel of its own
                    self.model(tokens, tokens, attention="sparse", report=[], report_rows=rows)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        world.say(
            f"{self.compiled()} graphs and kernels compiled or loaded in {time.perf_counter() - begin:.0f} s"
        )

    def train_step(self, stage: Stage, will_log: bool) -> dict:
        """One optimizer step on the global batch of self.step; returns what the log line says of it."""
        c, world = self.config, self.world
        world.at(f"the data of step {self.step + 1}")
        self.check_files()
        batch = self.loader.step(self.step, stage.seq_len, stage.document_mask, world.rank, world.size)
        sequences, micro = batch.tokens.shape[0], self.micro_batch(stage)
        nll = torch.zeros((), device=world.device)
        # The KL's value costs the reference time: for log lines only, unless compiled code would change.
        probe = self.kl_probe if will_log or self.compiles else None
        for begin in range(0, sequences, micro):
            world.at(f"step {self.step + 1}")
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(begin + micro >= sequences)
            out = self.forward(
                batch, slice(begin, begin + micro), stage, kl_probe=probe, activations=self.activations
            )
            nll_sum = out.nll.sum()
            loss = out.kl / (batch.n_tokens * c.n_proxy_head)
            if not stage.freeze_backbone:
                loss = loss + nll_sum / max(1, batch.n_labels)
            loss.backward()
            nll += nll_sum.detach()

        if stage.freeze_backbone:  # the KL's gradient there is zero, and zero would still decay weights
            for p in self.backbone:
                p.grad = None
        with record_function("gradients"):
            # Of the backbone and of the proxy, and for log lines of the backbone in the first and last layer.
            params_of_norms = [self.backbone, self.proxy]
            if will_log:
                layers = self.model.model["layers"]
                for layer in (layers[0], layers[-1]):
                    params_of_norms.append([p for n, p in layer.named_parameters() if not is_proxy(n)])
            grad_norms = [
                norm_of([p.grad for p in params if p.grad is not None], world.device)
                for params in params_of_norms
            ]
        kl = torch.zeros_like(self.kl_probe) if self.kl_probe.grad is None else self.kl_probe.grad
        sent = torch.tensor([float(self.signal_here == s) for s in STOP_SIGNALS], device=world.device)
        bad = torch.zeros(world.size, device=world.device)  # the ranks whose own loss is not finite
        bad[world.rank] = ~nll.isfinite()
        shared = world.sum(torch.cat([nll[None], sent, bad, kl.detach().flatten()]))
        # The step's one wait for the device.
        numbers = torch.cat([torch.stack(grad_norms), shared]).tolist()
        (grad_norm, proxy_grad_norm, *layer_norms), (nll, *rest) = (
            numbers[: len(grad_norms)],
            numbers[len(grad_norms) :],
        )
        sent, rest = rest[: len(STOP_SIGNALS)], rest[len(STOP_SIGNALS) :]
        bad, kl = rest[: world.size], rest[world.size :]
        # A signal that came while we waited counts in the next step, for every rank alike.
        self.stop_signal = next((s for s, ranks in zip(STOP_SIGNALS, sent, strict=True) if ranks), 0)

        share = self.schedule.lr_share(self.step)
        update = None
        if all(math.isfinite(x) for x in (nll, grad_norm, proxy_grad_norm, *kl)):
            self.skipped_in_a_row = 0
            for params, norm, limit in (
                (self.backbone, grad_norm, c.grad_clip),
                (self.proxy, proxy_grad_norm, c.proxy_grad_clip),
            ):
                if limit and norm > limit:
                    for p in params:
                        if p.grad is not None:
                            p.grad.mul_(limit / norm)
            with record_function("optimizer"):
                before = [p.detach().clone() for p in self.proxy] if will_log else []
                for optimizer in self.optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = group["peak"] * share
                    optimizer.step()
                if will_log:
                    moved = [p.detach() - b for p, b in zip(self.proxy, before, strict=True)]
                    update = norm_of(moved, world.device).item()
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            self.report_skip(nll / max(1, batch.n_labels), grad_norm, proxy_grad_norm, bad)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.kl_probe.grad = None

        with_proxy = c.n_layer - c.dense_layers
        rows = batch.n_tokens * c.n_proxy_head
        layer_kl = [
            sum(kl[i * c.n_proxy_head : (i + 1) * c.n_proxy_head]) / rows
            for i in range(c.dense_layers, c.n_layer)
        ]
        learns = stage.attention != "dense" and with_proxy > 0
        return {
            "loss": nll / max(1, batch.n_labels),
            "kl": sum(layer_kl) / with_proxy if learns else None,
            "grad_norm": grad_norm,
            "first_layer_grad_norm": layer_norms[0] if layer_norms else None,
            "last_layer_grad_norm": layer_norms[1] if layer_norms else None,
            "proxy_grad_norm": proxy_grad_norm if learns else None,
            "proxy_update_norm": update if learns else None,
            "lr": c.lr * share,
            "proxy_lr": c.proxy_lr * share,
            "pad_share": batch.n_pad / batch.n_tokens,
            "skipped": self.skipped,
            "layer_kl": layer_kl if learns else None,
            "flops": step_flops(self.model, batch, stage) if will_log else 0.0,
        }

    def report_skip(self, loss: float, grad_norm: float, proxy_grad_norm: float, bad: list[float]) -> None:
        """Says and logs a step that is skipped, with the place of its tokens in the stream."""
        c, n = self.config, self.config.tokens_per_step
        first = self.step * n
        ranks = [r for r, flag in enumerate(bad) if flag]
        share = n // self.world.size
        of_ranks = "".join(
            f"; rank {r}'s own loss, over tokens {first + r * share:,} to {first + (r + 1) * share - 1:,}"
            for r in ranks
            if self.world.size > 1
        )
        epoch = first // self.loader.stream.epoch_tokens
        self.world.say(
            f"step {self.step + 1}: skipped, not finite: loss {loss}, gradient norms {grad_norm} and "
            f"{proxy_grad_norm} (proxy); tokens {first:,} to {first + n - 1:,} of the stream, in epoch "
            f"{epoch}{of_ranks}"
        )
        self.log.write(
            {
                "kind": "skipped",
                "step": self.step + 1,
                "tokens": (self.step + 1) * c.tokens_per_step,
                "stage": self.schedule.stage_of(self.step),
                "first_token": first,
                "last_token": first + n - 1,
                "epoch": epoch,
                "loss": loss,
                "grad_norm": grad_norm,
                "proxy_grad_norm": proxy_grad_norm,
                "ranks": ranks,
                "skipped_in_a_row": self.skipped_in_a_row,
            }
        )

    # -- evaluation: fixed batches, each rank a share of them --

    @torch.no_grad()
    def evaluate(self, file: TokenFile, stage: Stage) -> dict[str, float]:
        """Loss, bits per byte and loss by position; for a retrieval set the accuracy of its answers."""
        c, world = self.config, self.world
        epoch = self.loader_of(file, stage.seq_len).stream.epoch_tokens
        sequences = max(1, min(c.eval_tokens, epoch) // stage.seq_len)
        micro = min(self.micro_batch(stage), sequences)
        loader = self.loader_of(file, micro * stage.seq_len)
        edges = [2**i for i in range(7, 40) if 2**i < stage.seq_len]  # 128, 256, ...
        sums = torch.zeros(2 + 2 * (len(edges) + 1) + 4, device=world.device, dtype=torch.float64)
        buckets = sums[2 : 2 + 2 * (len(edges) + 1)].view(2, -1)
        token_bytes = torch.from_numpy(np.array(file.token_bytes)).long()
        borders = torch.tensor(edges, device=world.device)
        for first in range(0, -(-sequences // micro), world.size):
            index = first + world.rank
            world.at(f"the evaluation after step {self.step}")
            self.check_files()
            batch = loader.step(index, stage.seq_len, stage.document_mask)
            # Where nothing is left FSDP still wants every rank in every forward.
            batch.labels[max(0, sequences - index * micro) :] = IGNORE
            out = self.forward(batch, slice(None), stage)
            place = torch.arange(stage.seq_len).repeat(batch.labels.shape[0], 1)
            if batch.doc_start_block is not None:
                place = place - batch.doc_start_block.repeat_interleave(c.block_size, 1) * c.block_size
            labelled = batch.labels != IGNORE
            nll = out.nll.double()
            sums[0] += nll.sum()
            sums[1] += int(token_bytes[batch.labels[labelled]].sum())
            bucket = torch.bucketize(place.to(world.device), borders, right=True).flatten()
            buckets[0].index_add_(0, bucket, nll.flatten())
            buckets[1].index_add_(0, bucket, labelled.to(world.device).double().flatten())
            if file.label_mask is not None:
                right, count = answers_right(out.correct.cpu(), labelled)
                hits = (out.correct.cpu() & labelled).sum()
                sums[-4:] += torch.tensor([hits, labelled.sum(), right, count], device=world.device)
        world.sum(sums)
        nll, n_bytes = sums[:2].tolist()
        by_bucket, counts = buckets.tolist()
        result = {"loss": nll / max(1.0, sum(counts))}
        if file.label_mask is not None:
            hits, labels, right, count = sums[-4:].tolist()
            result["token_accuracy"] = hits / max(1.0, labels)
            result["accuracy"] = right / max(1.0, count)
            return result
        result["bits_per_byte"] = nll / math.log(2) / max(1.0, n_bytes)
        starts = [0, *edges]
        for start, total, count in zip(starts, by_bucket, counts, strict=True):
            if count:
                result[f"loss_from_{start}"] = total / count
        return result

    def validate(self, stage: Stage) -> dict:
        """The fixed validation, the stage's own beside it, and the retrieval sets."""
        fixed = dataclasses.replace(
            stage, seq_len=self.config.stages[0].seq_len, attention="dense", document_mask=True
        )
        result = self.evaluate(self.val_file, fixed)
        own = result
        if (fixed.seq_len, fixed.attention, fixed.document_mask) != (
            stage.seq_len,
            stage.attention,
            stage.document_mask,
        ):
            own = self.evaluate(self.val_file, stage)
        result = {**result, **{f"stage_{key}": value for key, value in own.items()}}
        for name, file in self.retrieval.items():
            label = Path(name).name
            result.update({f"{label}_{key}": value for key, value in self.evaluate(file, stage).items()})
        return result

    @torch.no_grad()
    def inspect_proxy(self, stage: Stage) -> dict:
        """A forward on a fixed validation batch with the KL materialised, and the recalls of every layer."""
        c = self.config
        sequences = max(1, min(c.eval_tokens, 8192) // stage.seq_len)  # not by micro-batch: it is fixed
        batch = self.loader_of(self.val_file, sequences * stage.seq_len).step(
            0, stage.seq_len, stage.document_mask
        )
        generator = torch.Generator().manual_seed(c.seed)
        rows = torch.randperm(stage.seq_len, generator=generator)[: c.kl_rows].sort().values
        report: list[dict[str, Tensor]] = []
        self.forward(batch, slice(None), stage, report=report, report_rows=rows.to(self.world.device))
        n_rows = batch.tokens.numel() * c.n_proxy_head
        selected = [float(layer["kl_selected"]) / n_rows for layer in report]
        names = ("kl_full", "block_recall", "score_recall", "score_best")
        by_layer = {name: [layer[name].tolist() for layer in report] for name in names}
        means = {name: float(np.mean(by_layer[name])) for name in names}
        return {
            "kl_selected": float(np.mean(selected)),
            **means,
            "kl_rows": len(rows) * sequences,
            "recall_rows": int(report[0]["n_rows"]),
            "layer_kl_selected": selected,
            "by_layer": by_layer,
        }

    # -- the loop --

    @contextlib.contextmanager
    def profiler(self, stage_index: int) -> Iterator[None]:
        """Writes a trace of what happens under it, and where the GPU's time goes; rank 0 alone."""
        c, world = self.config, self.world
        if world.rank:
            yield
            return
        from msa import trace  # it brings the benchmark

        activities = [ProfilerActivity.CPU]
        if world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        begin = time.perf_counter()
        with profile(activities=activities, record_shapes=True) as recorded:
            yield
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            wall = (time.perf_counter() - begin) * 1e3
        path = Path(c.out_dir) / f"trace_{stage_index}.json.gz"
        sizes = {"vocab_size": c.vocab_size, "d_model": c.d_model, "d_mlp": c.d_mlp}
        try:
            recorded.export_chrome_trace(str(path))
            table = trace.format_parts(trace.parts(path, **sizes), wall)
            title = f"step {self.step + 1}, {c.stages[stage_index]}, keeps {self.activations!r}"
            text = f"{title}\n{table}\n"
            path.with_name(f"profile_{stage_index}.txt").write_text(text)
            world.say(f"{text}wrote {path}")
        except (OSError, ValueError) as error:
            world.say(f"no profile of stage {stage_index}: {error}")

    def save(self) -> None:
        c, world = self.config, self.world
        world.at(f"the checkpoint of step {self.step}")
        if not math.isfinite(norm_of([p.detach() for p in self.model.parameters()], world.device)):
            raise RunError(
                f"the weights are not finite after step {self.step}, so they were not saved; "
                f"{self.last_checkpoint()}. The same command tries again from there; if that ends alike, "
                f"{self.remedy()}"
            )
        keep = world.rank == 0
        weights, moments = gather_state(self.model, self.optimizers, keep)
        self.log.flush(sync=True)  # a checkpoint outlives a cut of power, and so must the lines before it
        failed = ""
        if keep:
            state = {
                "format": 1,
                "config": to_dict(c),
                "stage": min(self.schedule.stage_of(max(0, self.step - 1)), len(c.stages) - 1),
                "step": self.step,
                "skipped": self.skipped,
                "skipped_in_a_row": self.skipped_in_a_row,
                "data": self.data,
                "rng": torch.get_rng_state(),
                "model": weights,
                "optimizer": moments,
            }
            try:
                self.write_checkpoint(state)
            except OSError as error:
                failed = f"{error}"
                if not Path(c.out_dir).is_dir():
                    failed += f" (the folder {c.out_dir} is gone: put it back)"
        world.at(f"the end of the checkpoint of step {self.step}")
        if world.sum(torch.tensor(float(bool(failed)), device=world.device)):  # the ranks wait here
            raise RunError(
                f"the checkpoint of step {self.step} can't be written: {failed}; {self.last_checkpoint()}. "
                "Free some space or mend the folder; the same command continues from there"
            )
        self.saved_step = self.step
        self.note_checkpoint()

    def write_checkpoint(self, state: dict) -> None:
        out_dir = Path(self.config.out_dir)

        def write(file: BinaryIO) -> None:
            write_tensors(state, file)
            if self.saved_step is not None:
                keep_older(out_dir, self.saved_step)

        write_atomically(out_dir / "checkpoint.pt", write)
        drop_oldest(out_dir, self.step)

    def due(self, interval: int) -> bool:
        """Every `interval` steps, and at the end of each stage; 0: never."""
        return (
            interval > 0 and self.step > 0 and (self.step % interval == 0 or self.step in self.schedule.ends)
        )

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without compiled code, which would be compiled again for it."""
        self.model.eval()
        try:
            with torch.compiler.set_stance("force_eager") if self.compiles else contextlib.nullcontext():
                yield
        finally:
            self.model.train()

    def run_evaluations(self, stage_index: int) -> None:
        c, stage = self.config, self.config.stages[stage_index]
        base = {"step": self.step, "tokens": self.step * c.tokens_per_step, "stage": stage_index}
        with self.evaluating():
            if self.due(c.eval_interval):
                begin = time.perf_counter()
                result = self.validate(stage)
                seconds = time.perf_counter() - begin  # the figures are on the host: nothing is under way
                self.log.write({"kind": "val", **base, "seconds": seconds, **result})
                extra = "".join(f" {k} {v:.3f}" for k, v in result.items() if k.endswith("_accuracy"))
                self.world.say(
                    f"step {self.step} validation: loss {result['loss']:.4f} "
                    f"({result['bits_per_byte']:.4f} bits a byte), "
                    f"the stage's own {result['stage_loss']:.4f}{extra}"
                )
            if self.due(c.kl_interval) and stage.attention != "dense" and c.dense_layers < c.n_layer:
                begin = time.perf_counter()
                result = self.inspect_proxy(stage)
                seconds = time.perf_counter() - begin
                self.log.write({"kind": "proxy", **base, "seconds": seconds, **result})
                self.world.say(
                    f"step {self.step} proxy: KL {result['kl_selected']:.4f} selected, "
                    f"{result['kl_full']:.4f} full; block recall {result['block_recall']:.3f}, "
                    f"score recall {result['score_recall']:.3f} of at best {result['score_best']:.3f} "
                    f"({result['recall_rows']} rows, {seconds:.2f} s)"
                )

    def run(self) -> int:
        """Trains to the end, or to a signal, and returns 0."""
        c, world = self.config, self.world
        hup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup
        numbers = [s for s in STOP_SIGNALS if s != signal.SIGHUP or not hup_ignored]
        handlers = {s: signal.signal(s, self.on_signal) for s in numbers}
        try:
            self.train()
            if world.watch is not None:
                world.watch.leave(failed=False)  # what follows is rank 0's alone, and nobody waits for it
        except RunError:
            raise
        except RuntimeError:
            # A collective of gloo fails where another rank is gone; any other fault shows where it came from.
            if world.watch is not None and (why := world.watch.blame()):
                world.watch.end(why)
            raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.log.close()
        if world.rank == 0:
            try:
                world.say(f"wrote {draw_curves(c.out_dir)}\n{stage_table(c.out_dir)}")
            except (OSError, ValueError) as error:
                world.say(f"no curves.png: {error}")
        if self.stop_signal:
            name = signal.Signals(self.stop_signal).name
            world.say(f"stopped by {name} at step {self.step}, saved; the same command continues")
        return 0

    def train(self) -> None:
        c, world, schedule = self.config, self.world, self.schedule
        stage_index, profiled = -1, None
        if self.step < schedule.total:
            self.warm_up()
        if self.step:
            self.run_evaluations(schedule.stage_of(self.step - 1))
        mark_time, mark_step = time.perf_counter(), self.step
        while self.step < schedule.total and not self.stop_signal:
            first = schedule.stage_of(self.step) != stage_index  # of the stage, or after resuming
            if first:
                stage_index = schedule.stage_of(self.step)
                stage = c.stages[stage_index]
                world.say(f"stage {stage_index}: {stage}, to step {schedule.ends[stage_index]}")
                self.activations = self.plans[stage_index].activations
                if world.device.type == "cuda":
                    torch.cuda.empty_cache()  # of blocks that fitted the stage before
                    torch._C._host_emptyCache()  # or pinned blocks of each size would stay
                    torch.cuda.reset_peak_memory_stats()
                mark_time, mark_step = time.perf_counter(), self.step
            will_log = c.log_interval > 0 and (
                self.step == 0
                or (self.step + 1) % c.log_interval == 0
                or (c.layer_interval > 0 and (self.step + 1) % c.layer_interval == 0)
                or self.step + 1 in schedule.ends
            )
            # Not the first step of a stage, if there is another: it loads and compiles.
            end = schedule.ends[stage_index]
            profiles = c.profile and (profiled != stage_index) and (not first or self.step + 1 == end)
            profiled = stage_index if profiles else profiled
            with self.profiler(stage_index) if profiles else contextlib.nullcontext():
                record = self.train_step(stage, will_log)
            self.step += 1
            if self.skipped_in_a_row >= c.max_skipped_steps:
                raise RunError(
                    f"{self.skipped_in_a_row} steps in a row had a non-finite loss or gradient, up to step "
                    f"{self.step}; {self.last_checkpoint()}. Where one rank alone is named, suspect its GPU "
                    f"and run the same command without it; else look at the data there, or {self.remedy()}, "
                    f"{'a smaller grad_clip' if c.grad_clip else 'grad_clip switched on (--grad_clip=1)'} or "
                    "a longer lr_warmup_tokens"
                )
            layer_kl, flops = record.pop("layer_kl"), record.pop("flops")
            if will_log:
                seconds = (time.perf_counter() - mark_time) / (self.step - mark_step)
                if profiles:
                    seconds = None  # much of it went into recording
                self.report_step(record, stage, stage_index, seconds, flops, layer_kl)
            if will_log or first or profiles:
                mark_time, mark_step = time.perf_counter(), self.step
            evaluates = self.due(c.eval_interval) or self.due(c.kl_interval)
            if self.due(c.checkpoint_interval) or self.stop_signal or self.step == schedule.total:
                self.save()  # before the evaluation: whatever happens there costs nothing
            if evaluates and not self.stop_signal:
                begin = time.perf_counter()
                self.run_evaluations(stage_index)
                mark_time += time.perf_counter() - begin

    def on_signal(self, number: int, frame: object) -> None:
        """The step in hand is finished and saved. A second Ctrl-C does not wait for that; a second SIGTERM
        changes nothing: schedulers send one to every process, and torchrun hands its own on."""
        self.signal_here = number
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            if self.world.rank == 0:  # not by print, which the signal may have interrupted
                text = "finishing the step, then saving; a second Ctrl-C ends at once, and"
                with contextlib.suppress(OSError):
                    os.write(2, f"{text} {self.last_checkpoint()}\n".encode())

    def report_step(
        self,
        record: dict,
        stage: Stage,
        stage_index: int,
        seconds: float | None,
        flops: float,
        layer_kl: list[float] | None,
    ) -> None:
        c, world = self.config, self.world
        peak = memory = reserved = None
        if world.device.type == "cuda":
            name = torch.cuda.get_device_name()
            peak = next((t for gpu, t in PEAK_TFLOPS.items() if gpu in name), None)
            memory = torch.cuda.max_memory_allocated() / 2**30
            reserved = torch.cuda.max_memory_reserved() / 2**30
        host_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        memory = host_memory if memory is None else memory
        record = {
            "kind": "train",
            "step": self.step,
            "tokens": self.step * c.tokens_per_step,
            "stage": stage_index,
            "attention": stage.attention,
            "seq_len": stage.seq_len,
            **record,
            "tokens_per_second": c.tokens_per_step / seconds if seconds else None,
            "mfu": flops / seconds / (peak * 1e12) if peak and seconds else None,
            "peak_memory_gib": memory,
            "reserved_memory_gib": reserved,
            "predicted_memory_gib": self.plans[stage_index].total,
            "host_memory_gib": host_memory,
            "activations": self.activations,
            "compiled": self.compiled(),
            "eta_seconds": (self.schedule.total - self.step) * seconds if seconds else None,
        }
        if layer_kl is not None and self.due(c.layer_interval):
            record["layer_kl"] = layer_kl
        self.log.write(record)
        parts = [
            f"step {self.step}/{self.schedule.total} {stage.attention} {stage.seq_len}",
            f"loss {record['loss']:.4f}",
        ]
        if record["kl"] is not None:
            parts.append(f"kl {record['kl']:.4f}")
        parts.append(f"grad {record['grad_norm']:.2f}")
        if record["proxy_grad_norm"] is not None:
            parts.append(f"proxy grad {record['proxy_grad_norm']:.3f}")
        parts.append(f"lr {record['lr']:.1e}")
        if seconds:
            parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
        if record["mfu"] is not None:
            parts.append(f"mfu {record['mfu']:.1%}")
        parts.append(f"{memory:.1f} GiB")
        parts.append(f"eta {clock(record['eta_seconds'])}" if seconds else "profiled")
        world.say(" | ".join(parts))


def answers_right(correct: Tensor, labelled: Tensor) -> tuple[int, int]:
    """correct, labelled (B, S) bool -> (answers all right, answers); a run of labels is an answer."""
    starts = labelled.clone()
    starts[:, 1:] &= ~labelled[:, :-1]
    number = (
        starts.flatten().cumsum(0)[labelled.flatten()] - 1
    )  # the answer that each labelled token belongs to
    count = int(starts.sum())
    wrong = torch.zeros(count).index_add_(0, number, (~correct[labelled]).float())
    return int((wrong == 0).sum()), count


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def mapping(file: TokenFile) -> mmap.mmap:
    """What a token file is read through; it knows the file's size by now, under whatever name that is."""
    base = file.tokens
    while not isinstance(base, mmap.mmap):
        base = base.base
    return base


def check_ranks(config: Config, world: World) -> None:
    for stage in config.stages:
        sequences = config.tokens_per_step // stage.seq_len
        if sequences % world.size:
            raise ValueError(
                f"stages: seq_len {stage.seq_len} makes {sequences} sequences a step, which {world.size} "
                "ranks cannot share evenly; raise tokens_per_step or start fewer ranks"
            )


def set_vocab(config: Config, file: TokenFile) -> None:
    """Rows of the embedding: as the config says, else the data's, rounded up to a multiple of 64."""
    if config.vocab_size is None:
        config.vocab_size = -(-file.vocab_size // 64) * 64
    elif config.vocab_size < file.vocab_size:
        raise ValueError(
            f"vocab_size: {config.vocab_size} is less than {file.vocab_size}, the data's ({file.tokenizer})"
        )


def check_data(config: Config, train: Stream, val: Stream) -> None:
    """One vocabulary in both, in train.bin at least a step, in val.bin at least the longest sequence."""
    if train.file.tokenizer != val.file.tokenizer:
        raise ValueError(
            f"dataset: {val.file.path} has the tokenizer {val.file.tokenizer!r}, {train.file.path} has "
            f"{train.file.tokenizer!r}; prepare both again, together"
        )
    longest = max(stage.seq_len for stage in config.stages)
    for stream, least, what in (
        (train, config.tokens_per_step, "tokens_per_step"),
        (val, longest, "the seq_len of the longest stage"),
    ):
        if stream.epoch_tokens < least:
            raise ValueError(
                f"dataset: {stream.file.path} has {stream.epoch_tokens:,} tokens, fewer than {what} "
                f"({least:,}); prepare more text, or lower that"
            )


def dry_run(config: Config, world: World, data_commands: Iterable[str]) -> None:
    """Prints stages, parameters, tokens, memory and data commands; trains nothing and needs no data."""
    try:
        set_vocab(config, TokenFile(find_dataset(config.dataset) / "train.bin"))
        world.say(f"data: {find_dataset(config.dataset)}")
    except ValueError as error:
        world.say(f"data: {error}")
        if config.vocab_size is None:
            config.vocab_size = 50304
            world.say("vocab_size: 50304 assumed, for the data set is not there to tell")
    for line in data_commands:
        world.say(f"prepare: {line}")
    check_ranks(config, world)
    schedule = Schedule(config)
    world.say(
        f"{'stage':>5} {'attention':>9} {'seq_len':>9} {'seqs/step':>9} {'steps':>8} "
        f"{'tokens':>16} {'theta':>12}"
    )
    for i, (stage, steps) in enumerate(zip(config.stages, schedule.steps, strict=True)):
        world.say(
            f"{i:5} {stage.attention:>9} {stage.seq_len:9,} {config.tokens_per_step // stage.seq_len:9,} "
            f"{steps:8,} {steps * config.tokens_per_step:16,} {stage.rope_theta or config.rope_theta:12,.0f}"
        )
    world.say(f"total {schedule.total:,} steps, {schedule.total * config.tokens_per_step:,} tokens")
    with torch.device("meta"):
        model = Transformer(config)
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    total, proxy = sum(sizes.values()), sum(n for name, n in sizes.items() if is_proxy(name))
    embedding = sum(n for name, n in sizes.items() if "embed_tokens" in name or "lm_head" in name)
    world.say(
        f"parameters {total:,}: backbone {total - proxy - embedding:,}, embedding {embedding:,}, "
        f"proxy {proxy:,}"
    )
    dtype, compiles = compute_dtype(config, world)[0], compiles_rows(config, world)[0]
    there = memory_there_is(config, world)
    for i in range(len(config.stages)):
        try:
            choose_activations(config, world, i, there, dtype, compiles)
        except ValueError as error:
            world.say(str(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, or of the CPU, for which torch has no exception of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def out_of_memory(error: BaseException, config: Config, world: World, trainer: Trainer | None) -> str:
    """What was asked for, by which part of the run, what was predicted, and what would need less.
    trainer: None where it was still being made."""
    if config.vocab_size is None:
        return f"out of memory while reading the data: {error}"
    stage, plan = config.stages[0], None
    if trainer is not None:
        index = trainer.schedule.stage_of(min(trainer.step, trainer.schedule.total - 1))
        stage, plan = config.stages[index], trainer.plans[index]
    asked = str(error).split("DefaultCPUAllocator: ")[-1].partition("\n")[0].split(". GPU")[0].rstrip(".")
    dtype, compiles = compute_dtype(config, world)[0], compiles_rows(config, world)[0]
    if plan is None:  # there are no activations yet
        least = plan_memory(config, world, stage, ACTIVATIONS[-1], dtype, compiles)
        known = f"; {least.states:.1f} GiB of weights, gradients and moments were predicted"
        lower = "more ranks or a smaller model"
        if world.device.type == "cuda":
            lower += ", or on a GPU that nobody else uses"
    else:
        known = f"; predicted were {plan}"
        lower = needs_less(config, world, stage, plan, dtype, compiles)
    if world.device.type == "cuda":
        free, total = (x / 2**30 for x in torch.cuda.mem_get_info(world.device))
        held = torch.cuda.memory_allocated(world.device) / 2**30
        known += f"; {held:.1f} GiB are in use, {free:.1f} of {total:.1f} GiB were free"
    last = trainer.last_checkpoint() if trainer else f"what {config.out_dir} holds is as it was"
    return f"out of memory in {world.doing}: {asked}{known}. Less is needed with {lower}; {last}"


def data_commands_of(argv: list[str]) -> list[str]:
    """The lines at the head of the config file that prepare its data, with those that they go on in."""
    for arg in argv:
        for file in (Path(arg), Path(__file__).parent / arg):
            if arg.startswith("-") or not file.is_file():
                continue
            commands, goes_on = [], False
            for line in file.read_text().splitlines():
                if line.startswith("#") and ("prepare.py" in line or goes_on):
                    commands.append(line.strip("# "))
                    goes_on = line.endswith("\\")
            return commands
    return []


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    config = load_config(argv)
    if config.curves:
        tell(f"wrote {draw_curves(config.out_dir)}\n{stage_table(config.out_dir)}")
        return 0
    world = join_world(config)
    try:
        world.say(describe(config))
        if config.dry_run:
            dry_run(config, world, data_commands_of(argv))
            return 0
        trainer = None
        try:
            trainer = Trainer(config, world)
            return trainer.run()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OSError(out_of_memory(error, config, world, trainer)) from error
    finally:
        error = sys.exception()
        if world.lock is not None:
            world.lock.close()
        if world.watch is not None:
            world.watch.leave(failed=error is not None and not isinstance(error, RunError))
        if world.size > 1 and error is None:
            dist.destroy_process_group()


def command(argv: list[str] | None = None) -> int:
    """`main` for the shell: a message instead of a traceback for what is no fault of the code."""
    rank, ranks = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", 1))
    code = 1
    try:
        code = main(argv)
    except RunError as error:  # alike on all ranks
        if rank == "0":
            tell(f"error: {error}", error=True)
    except (ValueError, OSError) as error:
        tell(f"error: {f'rank {rank}: ' if ranks > 1 else ''}{error}", error=True)
        code = 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        tell("error: interrupted; what was saved is whole, the same command continues", error=True)
        code = 128 + signal.SIGINT
    if dist.is_initialized():
        # The ranks end in no order, and gloo may abort a process that winds up while another one is gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, on_interrupt)
    sys.exit(command())
