"""MiniMax Sparse Attention (arXiv 2606.13392): select key blocks with a small proxy, attend to them only.

    out, kl = sparse_attention(q, k, v, q_proxy, k_proxy, top_k=2048)
    loss = cross_entropy + kl / (query tokens of the global batch * proxy heads)

Shapes: q (B, S, H, D); k, v (B, Sk, Hkv, D); q_proxy (B, S, Hp, D); k_proxy (B, Sk, Hpk, D). H is a
multiple of Hp, Hp of Hkv and of Hpk; the H / Hp query heads of a group share one selection. Keys come in
blocks of `block_size`, `top_k` counts tokens. `kl` is the sum over batch, queries and proxy heads of
KL(teacher || student) (eq. 10 without its mean), whose gradient reaches q_proxy and k_proxy alone; `out`
reaches q, k and v alone. `kl` and all sums are fp32, fp64 for fp64 inputs.

Arguments that several functions take:
    scale: factor of main and proxy scores, 1 / sqrt(D) by default.
    doc_start_block (B, ceil(S / block_size)) int32: for each query block of the call the first key block of
        its document; queries see nothing before it.
    q_block (ceil(S / block_size),) int32: query t sits at place q_block[t // block_size] * block_size
        + t % block_size among the keys; distinct, in any order; by default 0, 1, ... Dense attention and
        warmup on a Hopper GPU take one run up to the last key.
    block_indices (B, S, Hp, k) int32 instead of top_k: slot 0 the query's own block, then distinct earlier
        blocks of its document in any order, -1 skipped. Works without a proxy; kl is 0 then.
    materialize_kl: give `kl` its true value (an extra pass). Otherwise its value is 0, its gradient real.
    kl_probe (Hp,) fp32 zeros that require grad: backward adds the KL sum of each proxy head to its gradient,
        whatever gradients arrive. Sums over micro-batches, counts once under activation checkpointing.

Whatever a function can't take is a ValueError that names the argument. Gradients have none of their own: a
second derivative is a RuntimeError.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from msa import reference
from msa.flash_msa import flash_msa_func, flash_msa_warmup_func

__all__ = [
    "backward_workspace",
    "decode_attention",
    "dense_attention",
    "flash_msa_func",
    "flash_msa_warmup_func",
    "select_blocks",
    "sparse_attention",
    "warmup_attention",
]


def announce(device_type: str, why_reference: str | None = None) -> None:
    """Says once, on the first rank, which implementation runs, and why."""
    if device_type != "cuda":
        why_reference = "the kernels need an NVIDIA GPU"
    what = "the Hopper kernels" if why_reference is None else f"the PyTorch reference ({why_reference})"
    _say_once(f"msa: attention on {device_type} runs {what}")


@functools.cache
def _say_once(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


@functools.cache
def _no_kernels(device: torch.device) -> str | None:
    """Why a device runs no kernels at all, None if it does."""
    if device.type != "cuda":
        return "the kernels need an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return "the kernels need a Hopper GPU, capability 9.0; this one has {}.{}".format(*capability)
    try:
        import msa.hopper  # noqa: F401
    except ImportError as error:
        return f"{error}; pip install -c constraints.txt -e '.[hopper]' brings what the kernels need"
    return None


@functools.lru_cache(maxsize=1024)
def _use_kernels(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    slots: int | None,
    group: int,
    proxy_key_heads: int | None,
) -> bool:
    """Whether the kernels run a call; the first call of each kind says so, with the reason if not."""
    why = _no_kernels(device)
    if why is None:
        from msa import hopper

        why = hopper.why_not(dtype, head_dim, block_size, slots, group, proxy_key_heads)
    announce(device.type, why)
    return why is None


# ---- ops: what torch.compile and selective checkpointing see ----------------------------------------

_library = torch.library.Library("msa", "DEF")
_PLAIN = frozenset((Tensor, torch.nn.Parameter, int, float, bool, type(None)))


def _observed(arguments: tuple) -> bool:
    """Whether others take part in a call: torch.compile, a dispatch mode (selective checkpointing, fake
    tensors), torch.func, a profiler, or a subclass of Tensor."""
    return (
        torch.compiler.is_compiling()
        or _get_current_dispatch_mode() is not None
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
        or not _PLAIN.issuperset(map(type, arguments))
    )


def _op(function: Callable) -> Callable:
    """Makes `_name` the op msa::name on all devices, and returns what calls it.

    What `torch.library.custom_op` does, without its wrappers. A call that nobody observes doesn't go through
    the dispatcher either: both take the host longer than the op itself.
    """
    name = function.__name__.removeprefix("_")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _library.define(name + torch.library.infer_schema(function, mutates_args=()), tags=tags)
    _library.impl(name, function, "CompositeExplicitAutograd")
    op = getattr(torch.ops.msa, name).default

    def call(*arguments):
        return op(*arguments) if _observed(arguments) else function(*arguments)

    return call


@_op
def _select_blocks(
    q_proxy: Tensor,
    k_proxy: Tensor,
    doc_start_block: Tensor | None,
    q_block: Tensor | None,
    slots: int,
    scale: float,
    block_size: int,
) -> Tensor:
    if _use_kernels(q_proxy.device, q_proxy.dtype, q_proxy.shape[3], block_size, slots, 1, k_proxy.shape[2]):
        from msa import hopper

        return hopper.select(q_proxy, k_proxy, doc_start_block, q_block, slots)
    return reference.select(q_proxy, k_proxy, doc_start_block, q_block, slots, scale, block_size)


@torch.library.register_fake("msa::select_blocks", lib=_library)
def _(q_proxy, k_proxy, doc_start_block, q_block, slots, scale, block_size):
    return q_proxy.new_empty(*q_proxy.shape[:3], slots, dtype=torch.int32)


def _attention_uses_kernels(
    q: Tensor,
    k: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    block_indices: Tensor | None,
    doc_start_block: Tensor | None,
    q_block: Tensor | None,
    block_size: int,
) -> bool:
    heads, head_dim = q.shape[2:]
    slots, group = None, 1
    if block_indices is not None:
        proxy_heads, slots = block_indices.shape[2:]
        group = heads // proxy_heads
    else:
        earlier = 0 if q_block is None else k.shape[1] - q.shape[1]
        if q.device.type == "cuda" and earlier and (doc_start_block is not None or earlier % block_size):
            announce(
                "cuda", "dense kernels take pieces of a sequence only without documents, and whole blocks"
            )
            return False
        if q_proxy is not None:
            group = heads // q_proxy.shape[2]
    proxy_key_heads = None if k_proxy is None else k_proxy.shape[2]
    return _use_kernels(q.device, q.dtype, head_dim, block_size, slots, group, proxy_key_heads)


@_op
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    block_indices: Tensor | None,
    doc_start_block: Tensor | None,
    q_block: Tensor | None,
    kl_probe: Tensor | None,
    scale: float,
    block_size: int,
    materialize_kl: bool,
    check_indices: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if _attention_uses_kernels(q, k, q_proxy, k_proxy, block_indices, doc_start_block, q_block, block_size):
        from msa import hopper

        if block_indices is not None:
            return hopper.forward(q, k, v, q_proxy, k_proxy, block_indices, scale, materialize_kl)
        return hopper.dense.forward(
            q, k, v, q_proxy, k_proxy, doc_start_block, q_block, scale, materialize_kl
        )
    if check_indices:
        reference.check_block_indices(block_indices, q_block, doc_start_block, block_size)
    return reference.forward(
        q, k, v, q_proxy, k_proxy, block_indices, doc_start_block, q_block, scale, block_size, materialize_kl
    )


@torch.library.register_fake("msa::attention", lib=_library)
def _(q, k, v, q_proxy, k_proxy, block_indices, doc_start_block, q_block, kl_probe, *flags):
    dtype = reference.accumulate_dtype(q.dtype)
    batch, n_queries, heads, _ = q.shape
    proxy = (0,) if q_proxy is None else (batch, q_proxy.shape[2], n_queries)
    return (
        q.new_empty(q.shape),
        q.new_empty((), dtype=dtype),
        q.new_empty((batch, heads, n_queries), dtype=dtype),
        q.new_empty(proxy, dtype=dtype),
    )


@_op
def _attention_backward(
    grad_out: Tensor | None,
    grad_kl: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    block_indices: Tensor | None,
    doc_start_block: Tensor | None,
    q_block: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_proxy: Tensor,
    scale: float,
    block_size: int,
    need_kl: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if _attention_uses_kernels(q, k, q_proxy, k_proxy, block_indices, doc_start_block, q_block, block_size):
        from msa import hopper

        grads, saved = (grad_out, grad_kl), (out, lse, lse_proxy, scale, need_kl)
        if block_indices is not None:
            return hopper.backward(*grads, q, k, v, q_proxy, k_proxy, block_indices, *saved)
        return hopper.dense.backward(*grads, q, k, v, q_proxy, k_proxy, doc_start_block, q_block, *saved)
    return reference.backward(
        grad_out,
        grad_kl,
        q,
        k,
        v,
        q_proxy,
        k_proxy,
        block_indices,
        doc_start_block,
        q_block,
        out,
        lse,
        lse_proxy,
        scale,
        block_size,
        need_kl,
    )


@torch.library.register_fake("msa::attention_backward", lib=_library)
def _(grad_out, grad_kl, q, k, v, q_proxy, k_proxy, indices, doc, q_block, out, lse, lse_proxy, *flags):
    def like(grad, x):
        return lse.new_empty(0) if grad is None or x is None else x.new_empty(x.shape)

    has_kl = q_proxy is not None and (grad_kl is not None or flags[-1])
    kl = lse.new_empty(q_proxy.shape[2] if has_kl else 0)
    main = [like(grad_out, x) for x in (q, k, v)]
    return *main, like(grad_kl, q_proxy), like(grad_kl, k_proxy), kl


def _save_for_backward(ctx, inputs, output) -> None:
    q, k, v, q_proxy, k_proxy, block_indices, doc_start_block, q_block, kl_probe, scale, block_size, *_ = (
        inputs
    )
    out, _, lse, lse_proxy = output
    ctx.save_for_backward(
        q, k, v, q_proxy, k_proxy, block_indices, doc_start_block, q_block, out, lse, lse_proxy
    )
    ctx.set_materialize_grads(False)  # what no loss asks for is not computed
    ctx.scale, ctx.block_size = scale, block_size
    ctx.probe_dtype = None if kl_probe is None else kl_probe.dtype


def _backward(ctx, grad_out, grad_kl, *_):
    saved = ctx.saved_tensors  # once: activation checkpointing hands them out a single time
    need_kl = ctx.probe_dtype is not None
    *grads, kl = _attention_backward(grad_out, grad_kl, *saved, ctx.scale, ctx.block_size, need_kl)
    if grad_out is None:
        grads[:3] = [None] * 3
    if grad_kl is None or saved[3] is None:
        grads[3:] = [None] * 2
    return *grads, None, None, None, kl.to(ctx.probe_dtype) if need_kl else None, None, None, None, None


torch.library.register_autograd("msa::attention", _backward, setup_context=_save_for_backward, lib=_library)


class _Attend(torch.autograd.Function):
    """The op's autograd where nothing is traced: `register_autograd`'s own costs the host 0.1 ms a call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _attention(*inputs)
        _save_for_backward(ctx, inputs, output)
        return output[:2]

    backward = staticmethod(once_differentiable(_backward))


def _attend(*inputs) -> tuple[Tensor, Tensor]:
    """The op msa::attention: out and kl."""
    return _attention(*inputs)[:2] if torch.compiler.is_compiling() else _Attend.apply(*inputs)


# ---- checks of what is known without looking at values ----------------------------------------------


def _remembered(check: Callable) -> Callable:
    """`check`, which of tensors looks at shapes, dtypes and devices alone, done once for each of those."""
    passed: dict[tuple, object] = {}  # what it returned, never None

    def call(*arguments):
        if _observed(arguments):
            return check(*arguments)
        # Types beside values: 128.0 equals 128, and is none.
        key = tuple(
            [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in arguments]
        )
        result = passed.get(key)
        if result is None:
            result = check(*arguments)
            if len(passed) >= 1024:
                passed.clear()
            passed[key] = result
        return result

    return call


def _require(ok: bool, message: Callable[[], str]) -> None:
    # The text is made only where it is needed: torch.compile takes a length that is printed for a constant.
    if not ok:
        raise ValueError(message())


def _check_tensors(block_size: int, **tensors: Tensor | None) -> None:
    """Rank 4, one device, one floating dtype, one batch and head dim; keys of one length, as many v as k."""
    _require(
        isinstance(block_size, int) and block_size > 0,
        lambda: f"block_size: must be a positive int, got {block_size!r}",
    )
    queries = next(iter(tensors))
    keys = "k" if "k" in tensors else "k_proxy"
    for name, x in tensors.items():
        _check_like(name, x, queries, tensors[queries])
        pattern = queries if name in ("q", "q_proxy") else keys
        _check_length(name, x.shape[1], pattern, tensors[pattern].shape[1])
    if "v" in tensors:
        heads, kv_heads = tensors["v"].shape[2], tensors["k"].shape[2]
        _require(heads == kv_heads, lambda: f"v: has {heads} heads, but k has {kv_heads}; they must agree")


def _check_like(name: str, x: Tensor | None, q_name: str, q: Tensor) -> None:
    _require(isinstance(x, Tensor), lambda: f"{name}: must be a tensor, got {type(x).__name__}")
    _require(
        x.dim() == 4, lambda: f"{name}: must be (batch, sequence, heads, head_dim), got {tuple(x.shape)}"
    )
    _require(x.is_floating_point(), lambda: f"{name}: must be floating point, got {x.dtype}")
    _require(min(x.shape) > 0, lambda: f"{name}: no dimension may be empty, got {tuple(x.shape)}")
    _require(x.device == q.device, lambda: f"{name}: is on {x.device}, but {q_name} is on {q.device}")
    _require(
        x.dtype == q.dtype, lambda: f"{name}: is {x.dtype}, but {q_name} is {q.dtype}; give all the same"
    )
    for dim, what in ((0, "batch"), (3, "head_dim")):
        mine, other = x.shape[dim], q.shape[dim]
        _check_length(name, mine, q_name, other, what)


def _check_length(name: str, mine: int, pattern: str, other: int, what: str = "sequence") -> None:
    _require(mine == other, lambda: f"{name}: {what} is {mine}, but {pattern}'s is {other}; they must agree")


def _check_heads(heads: int, kv_heads: int, proxy_heads: int, source: str, proxy_kv_heads: int = 1) -> None:
    _require(heads % kv_heads == 0, lambda: f"q: {heads} heads are no multiple of k's {kv_heads}")
    _require(
        proxy_heads % kv_heads == 0,
        lambda: f"{source}: {proxy_heads} heads are no multiple of k's {kv_heads}",
    )
    _require(
        heads % proxy_heads == 0, lambda: f"q: {heads} heads are no multiple of {source}'s {proxy_heads}"
    )
    _require(
        proxy_heads % proxy_kv_heads == 0,
        lambda: f"k_proxy: {proxy_kv_heads} heads do not divide q_proxy's {proxy_heads}",
    )


def _check_int32(name: str, x: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    if x is not None:
        _require(isinstance(x, Tensor), lambda: f"{name}: must be a tensor, got {type(x).__name__}")
        _require(x.dtype == torch.int32, lambda: f"{name}: must be int32, got {x.dtype}")
        _require(
            tuple(x.shape) == shape, lambda: f"{name}: must have the shape {shape}, got {tuple(x.shape)}"
        )
        _require(x.device == device, lambda: f"{name}: is on {x.device}, but the queries are on {device}")


def _check_places(
    name: str,
    queries: Tensor,
    n_keys: int,
    doc_start_block: Tensor | None,
    q_block: Tensor | None,
    block_size: int,
) -> None:
    n_queries, n_blocks = queries.shape[1], -(-queries.shape[1] // block_size)
    _check_int32("doc_start_block", doc_start_block, (queries.shape[0], n_blocks), queries.device)
    _check_int32("q_block", q_block, (n_blocks,), queries.device)
    _require(
        q_block is not None or n_queries <= n_keys,
        lambda: f"{name}: {n_queries} queries need as many keys, there are {n_keys}; or else give q_block",
    )


def _slots(top_k: int, block_size: int) -> int:
    _require(
        isinstance(top_k, int) and top_k > 0 and top_k % block_size == 0,
        lambda: (
            f"top_k: counts tokens and must be a positive multiple of block_size {block_size}, got {top_k!r}"
        ),
    )
    return top_k // block_size


def _scale(scale: float | None, head_dim: int) -> float:
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    _require(0 < scale < math.inf, lambda: f"scale: must be finite and above 0, got {scale}")
    return scale


def _check_probe(kl_probe: Tensor | None, proxy_heads: int, queries: Tensor) -> None:
    if kl_probe is not None:
        dtype = reference.accumulate_dtype(queries.dtype)
        _require(
            isinstance(kl_probe, Tensor)
            and tuple(kl_probe.shape) == (proxy_heads,)
            and kl_probe.dtype in (torch.float32, dtype)
            and kl_probe.device == queries.device,
            lambda: (
                f"kl_probe: must be float32 of shape ({proxy_heads},) on {queries.device}, got "
                + (
                    f"{kl_probe.dtype} {tuple(kl_probe.shape)} on {kl_probe.device}"
                    if isinstance(kl_probe, Tensor)
                    else type(kl_probe).__name__
                )
            ),
        )


# ---- public functions -------------------------------------------------------------------------------


@_remembered
def _check_select(q_proxy, k_proxy, doc_start_block, q_block, top_k, scale, block_size) -> tuple[int, float]:
    """Slots and scale."""
    _check_tensors(block_size, q_proxy=q_proxy, k_proxy=k_proxy)
    _check_heads(q_proxy.shape[2], 1, q_proxy.shape[2], "q_proxy", k_proxy.shape[2])
    slots, scale = _slots(top_k, block_size), _scale(scale, q_proxy.shape[3])
    _check_places("q_proxy", q_proxy, k_proxy.shape[1], doc_start_block, q_block, block_size)
    return slots, scale


def select_blocks(
    q_proxy: Tensor,
    k_proxy: Tensor,
    *,
    top_k: int,
    scale: float | None = None,
    doc_start_block: Tensor | None = None,
    q_block: Tensor | None = None,
    block_size: int = 128,
) -> Tensor:
    """Eq. 6 and 7: the top_k / block_size key blocks of each query and proxy head.

    A block's score is the largest proxy score of its visible tokens (a NaN counts as -inf). Slot 0 holds the
    query's own block, the later ones the earlier blocks of its document by descending score, equal scores to
    the lower block, and -1 where blocks run out.

    Returns block_indices (B, S, Hp, top_k / block_size) int32; no gradient. Raises ValueError.
    """
    slots, scale = _check_select(q_proxy, k_proxy, doc_start_block, q_block, top_k, scale, block_size)
    return _select_blocks(
        q_proxy.detach(), k_proxy.detach(), doc_start_block, q_block, slots, scale, block_size
    )


@_remembered
def _check_sparse(
    q, k, v, q_proxy, k_proxy, doc_start_block, q_block, block_indices, kl_probe, top_k, scale,
    materialize_kl, block_size,
) -> tuple[int | None, float]:  # fmt: skip
    """Slots, None where block_indices says them, and scale."""
    proxy = {"q_proxy": q_proxy, "k_proxy": k_proxy}
    _require(
        (q_proxy is None) == (k_proxy is None),
        lambda: "q_proxy, k_proxy: give both or neither, one of them is None",
    )
    _require(
        (top_k is None) != (block_indices is None),
        lambda: (
            "top_k, block_indices: give exactly one of them, got " + ("neither" if top_k is None else "both")
        ),
    )
    _check_tensors(block_size, q=q, k=k, v=v, **({} if q_proxy is None else proxy))
    scale = _scale(scale, q.shape[3])
    _check_places("q", q, k.shape[1], doc_start_block, q_block, block_size)
    if q_proxy is None:
        _require(top_k is None, lambda: "q_proxy: top_k selects with the proxy; give q_proxy and k_proxy")
        _require(kl_probe is None, lambda: "kl_probe: there is no KL without q_proxy and k_proxy")
        _require(not materialize_kl, lambda: "materialize_kl: there is no KL without q_proxy and k_proxy")
    else:
        _check_heads(q.shape[2], k.shape[2], q_proxy.shape[2], "q_proxy", k_proxy.shape[2])
        _check_probe(kl_probe, q_proxy.shape[2], q)
    if block_indices is None:
        return _slots(top_k, block_size), scale
    _require(
        isinstance(block_indices, Tensor) and block_indices.dim() == 4 and min(block_indices.shape) > 0,
        lambda: "block_indices: must be a tensor (B, S, Hp, k) with no empty dimension",
    )
    heads = block_indices.shape[2] if q_proxy is None else q_proxy.shape[2]
    shape = (*q.shape[:2], heads, block_indices.shape[3])
    _check_int32("block_indices", block_indices, shape, q.device)
    _check_heads(q.shape[2], k.shape[2], heads, "block_indices")
    return None, scale


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None = None,
    k_proxy: Tensor | None = None,
    *,
    top_k: int | None = None,
    scale: float | None = None,
    doc_start_block: Tensor | None = None,
    q_block: Tensor | None = None,
    block_indices: Tensor | None = None,
    materialize_kl: bool = False,
    kl_probe: Tensor | None = None,
    block_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """Eq. 8 to 10: exact softmax attention over the selected blocks, and the KL that teaches the proxy.

    Takes exactly one of top_k (the proxy selects) and block_indices (handed over; the proxy may be left out).
    The teacher is the mean over a group's heads of their attention over the selected tokens, detached; the
    student is the proxy's softmax over the same tokens.

    Returns (out (B, S, H, D) in q's dtype, kl 0-dim). Raises ValueError.
    """
    slots, scale = _check_sparse(
        q, k, v, q_proxy, k_proxy, doc_start_block, q_block, block_indices, kl_probe, top_k, scale,
        materialize_kl, block_size,
    )  # fmt: skip
    check_indices = block_indices is not None
    if block_indices is None:
        block_indices = _select_blocks(
            q_proxy.detach(), k_proxy.detach(), doc_start_block, q_block, slots, scale, block_size
        )
    return _attend(
        q, k, v, q_proxy, k_proxy, block_indices, doc_start_block, q_block, kl_probe, scale, block_size,
        materialize_kl, check_indices,
    )  # fmt: skip


@_remembered
def _check_warmup(q, k, v, q_proxy, k_proxy, doc_start_block, q_block, kl_probe, scale, block_size) -> float:
    """The scale."""
    _check_tensors(block_size, q=q, k=k, v=v, q_proxy=q_proxy, k_proxy=k_proxy)
    _check_heads(q.shape[2], k.shape[2], q_proxy.shape[2], "q_proxy", k_proxy.shape[2])
    _check_probe(kl_probe, q_proxy.shape[2], q)
    scale = _scale(scale, q.shape[3])
    _check_places("q", q, k.shape[1], doc_start_block, q_block, block_size)
    return scale


def warmup_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor,
    k_proxy: Tensor,
    *,
    scale: float | None = None,
    doc_start_block: Tensor | None = None,
    q_block: Tensor | None = None,
    materialize_kl: bool = False,
    kl_probe: Tensor | None = None,
    block_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """Dense causal attention, while the proxy learns over all visible tokens (eq. 9 and 10 over those).

    Returns (out (B, S, H, D) in q's dtype, kl 0-dim). Raises ValueError.
    """
    scale = _check_warmup(q, k, v, q_proxy, k_proxy, doc_start_block, q_block, kl_probe, scale, block_size)
    return _attend(
        q, k, v, q_proxy, k_proxy, None, doc_start_block, q_block, kl_probe, scale, block_size,
        materialize_kl, False,
    )  # fmt: skip


@_remembered
def _check_dense(q, k, v, doc_start_block, q_block, scale, block_size) -> float:
    """The scale."""
    _check_tensors(block_size, q=q, k=k, v=v)
    _check_heads(q.shape[2], k.shape[2], k.shape[2], "k")
    scale = _scale(scale, q.shape[3])
    _check_places("q", q, k.shape[1], doc_start_block, q_block, block_size)
    return scale


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    doc_start_block: Tensor | None = None,
    q_block: Tensor | None = None,
    block_size: int = 128,
) -> Tensor:
    """Dense causal attention with the same places and documents: out (B, S, H, D). Raises ValueError."""
    scale = _check_dense(q, k, v, doc_start_block, q_block, scale, block_size)
    out, _ = _attend(
        q, k, v, None, None, None, doc_start_block, q_block, None, scale, block_size, False, False
    )
    return out


@_remembered
def _check_decode(q, k, v, q_proxy, k_proxy, lengths, top_k, scale, block_size) -> tuple[int | None, float]:
    """Slots, None for dense attention, and scale."""
    proxy = {"q_proxy": q_proxy, "k_proxy": k_proxy}
    _require(
        (q_proxy is None) == (k_proxy is None),
        lambda: "q_proxy, k_proxy: give both or neither, one of them is None",
    )
    _check_tensors(block_size, q=q, k=k, v=v, **({} if q_proxy is None else proxy))
    _require(q.shape[1] == 1, lambda: f"q: takes one query a sequence, got {q.shape[1]}")
    if q_proxy is None:
        _require(top_k is None, lambda: "q_proxy: top_k selects with the proxy; give q_proxy and k_proxy")
        _check_heads(q.shape[2], k.shape[2], k.shape[2], "k")
    else:
        _check_heads(q.shape[2], k.shape[2], q_proxy.shape[2], "q_proxy", k_proxy.shape[2])
    _require(
        isinstance(lengths, Tensor)
        and not lengths.is_floating_point()
        and tuple(lengths.shape) == q.shape[:1],
        lambda: f"lengths: must be an int tensor of shape ({q.shape[0]},)",
    )
    return None if top_k is None else _slots(top_k, block_size), _scale(scale, q.shape[3])


@torch.no_grad()
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None = None,
    k_proxy: Tensor | None = None,
    *,
    lengths: Tensor,
    top_k: int | None = None,
    scale: float | None = None,
    block_size: int = 128,
) -> Tensor:
    """One query a sequence against a cache: q (B, 1, H, D), query b at place lengths[b] - 1 of its keys.

    lengths (B,) ints from 1 to Sk; keys at lengths[b] and later are not looked at. Their values are checked
    where they lie on the CPU: on a GPU that would wait for it, and one out of range makes the output of its
    sequence meaningless. top_k None attends densely.

    k, v and k_proxy may be views of a whole cache: sparse attention reads k_proxy once and of K and V the
    selected blocks. With lengths on the GPU nothing waits for it and a CUDA graph captures the call.

    Returns out (B, 1, H, D); no gradient. Raises ValueError.
    """
    slots, scale = _check_decode(q, k, v, q_proxy, k_proxy, lengths, top_k, scale, block_size)
    if lengths.device.type == "cpu":
        _require(
            bool(((lengths >= 1) & (lengths <= k.shape[1])).all()),
            lambda: f"lengths: must lie between 1 and the {k.shape[1]} keys, got {lengths.tolist()}",
        )
    announce(q.device.type, "decoding one token is plain PyTorch everywhere")
    return reference.decode(q, k, v, q_proxy, k_proxy, lengths, slots, scale, block_size)


def backward_workspace(
    *,
    batch: int,
    seq_len: int,
    heads: int,
    kv_heads: int,
    proxy_heads: int | None,
    top_k: int | None,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int = 128,
    block_size: int = 128,
) -> int:
    """Bytes that the backward of a call works in, beside its inputs, outputs and gradients.

    proxy_heads None: `dense_attention`; top_k None: `warmup_attention`. Exact for the sparse kernels, an
    estimate for the dense ones and for the reference.
    """
    slots = None if top_k is None or proxy_heads is None else _slots(top_k, block_size)
    if _no_kernels(device) is None and dtype == torch.bfloat16 and head_dim == block_size == 128:
        from msa import hopper

        return hopper.workspace_of(batch, seq_len, heads, kv_heads, proxy_heads, slots, device)
    row = batch * heads * seq_len  # scores of one query
    scores = min(row * seq_len, max(row, reference.CHUNK_ELEMENTS.get(device.type, 0)))
    size = 8 if dtype == torch.float64 else 4
    return size * (6 * scores + batch * seq_len * (2 * heads + 4 * kv_heads) * head_dim)
