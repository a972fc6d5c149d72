"""Dense attention on Hopper GPUs, and the proxy's KL beside it: FlashAttention-4 and `dense_kl`.

The main branch is FlashAttention-4's (the `flash-attn-4` wheel), with its logsumexp; where that is not
installed, PyTorch's own flash attention. Documents are sequences of different lengths to both: `cu_seqlens`,
padded to one length with empty sequences, so that nothing has to be known on the host.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from msa.hopper import jit
from msa.hopper.backward import PART, SumKeys
from msa.hopper.dense_kl import ROWS, TILE_SUM, DenseKl, DenseLse, RoundQueries
from msa.hopper.device import BLOCK, LN2, LOG2E
from msa.hopper.launch import aligned, multiprocessors
from msa.hopper.proxy import SumKl

# FlashAttention-4 compiles other kernels for more than 256 sequences. It is always handed as many documents,
# empty ones at the end, so that it compiles once.
MANY = 257


@functools.cache
def flash() -> tuple[Callable, Callable] | None:
    """FlashAttention-4's forward and backward, None (said once) where it is not installed."""
    # It compiles as we do, for seconds, and keeps what it compiled only if told so before it is imported.
    folder = jit.cache_dir()
    if folder is not None and "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED" not in os.environ:
        os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
        os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(folder / "flash_attn")
    try:
        from flash_attn.cute import interface
    except ImportError as error:
        print(
            f"msa: dense attention runs PyTorch's flash attention, FlashAttention-4 is missing ({error}); "
            "pip install -c constraints.txt -e '.[hopper]' brings it",
            file=sys.stderr,
            flush=True,
        )
        return None
    return interface._flash_attn_fwd, interface._flash_attn_bwd


class Places:
    """Which keys the queries of a dense call see: all before them, or from the start of their document."""

    def __init__(self, q: Tensor, k: Tensor, doc_start_block: Tensor | None, q_block: Tensor | None):
        self.batch, self.n_queries = q.shape[:2]
        # Without q_block queries sit at the first keys; with it, at the last.
        self.n_keys = self.n_queries if q_block is None else k.shape[1]
        self.doc_start_block = doc_start_block
        if q_block is not None:
            first = (self.n_keys - self.n_queries) // BLOCK
            run = torch.arange(first, first + q_block.shape[0], device=q.device, dtype=torch.int32)
            # An error that comes late, but without waiting for the GPU.
            torch._assert_async(
                (q_block == run).all(), "q_block: dense attention needs one run up to the last key"
            )
        self.cu_seqlens = None
        if doc_start_block is not None or flash() is None:
            # Of queries and keys; with documents there are as many of both.
            self.cu_seqlens = tuple(self.borders(n, q.device) for n in (self.n_queries, self.n_keys))

    def borders(self, length: int, device: torch.device) -> Tensor:
        """int32: where documents and sequences start, then the end: (B * query blocks + 1,), or MANY + 1."""
        total = self.batch * length
        starts = torch.arange(0, total, length, device=device, dtype=torch.int32)[:, None]
        least = 0
        if self.doc_start_block is not None:
            least = MANY
            blocks = torch.arange(self.doc_start_block.shape[1], device=device, dtype=torch.int32)
            starts = torch.where(self.doc_start_block == blocks, starts + blocks * BLOCK, total)
        starts = starts.flatten().sort().values
        return pad(starts, (0, max(0, least - starts.shape[0]) + 1), value=total)

    def keys(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(aligned(x if x.shape[1] == self.n_keys else x[:, : self.n_keys]) for x in tensors)


def attend(q: Tensor, k: Tensor, v: Tensor, places: Places, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, S, H, D) and lse (B, H, S)"""
    cu = places.cu_seqlens
    if flash() is None:
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *flat, *cu, places.n_queries, places.n_keys, 0.0, True, False, scale=scale
        )
        return out.view(q.shape), unflatten(lse, places)
    if cu is None:
        out, lse, *_ = flash()[0](q, k, v, softmax_scale=scale, causal=True, return_lse=True)
        return out, lse
    out, lse, *_ = flash()[0](
        *(x.flatten(0, 1) for x in (q, k, v)),
        cu_seqlens_q=cu[0],
        cu_seqlens_k=cu[1],
        max_seqlen_q=places.n_queries,
        max_seqlen_k=places.n_keys,
        softmax_scale=scale,
        causal=True,
        return_lse=True,
    )
    return out.view(q.shape), unflatten(lse, places)


def unflatten(lse: Tensor, places: Places) -> Tensor:
    """(H, B * S) -> (B, H, S)"""
    return lse.view(lse.shape[0], places.batch, -1).transpose(0, 1).contiguous()


def attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, places: Places, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv"""
    cu, n = places.cu_seqlens, places.n_queries
    deterministic = torch.are_deterministic_algorithms_enabled()
    if cu is None:
        dq, dk, dv, *_ = flash()[1](
            q, k, v, out, grad_out, lse, softmax_scale=scale, causal=True, deterministic=deterministic
        )
        return dq, dk, dv
    flat = [x.flatten(0, 1) for x in (q, k, v, out, grad_out)]
    lse = lse.transpose(0, 1).reshape(lse.shape[1], -1)
    if flash() is None:
        q_, k_, v_, out_, grad_ = flat
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
        grads = torch.ops.aten._flash_attention_backward(
            grad_, q_, k_, v_, out_, lse, *cu, n, places.n_keys, 0.0, True, seed, seed, scale=scale
        )
    else:
        grads = flash()[1](
            *flat,
            lse,
            cu_seqlens_q=cu[0],
            cu_seqlens_k=cu[1],
            max_seqlen_q=n,
            max_seqlen_k=places.n_keys,
            softmax_scale=scale,
            causal=True,
            deterministic=deterministic,
        )
    return tuple(grad.view(x.shape) for grad, x in zip(grads[:3], (q, k, v), strict=True))


def padded_lse(lse: Tensor) -> Tensor:
    """(B, H, S), natural -> base 2, whole tiles of rows: inf where there is no query."""
    return pad(lse * LOG2E, (0, -lse.shape[2] % ROWS), value=float("inf"))


def student_lse(q_proxy: Tensor, k_proxy: Tensor, places: Places, scale: float) -> Tensor:
    """(B, Hp, whole tiles of rows), base 2"""
    batch, n_queries, heads, _ = q_proxy.shape
    lse = q_proxy.new_empty(batch, heads, -(-n_queries // ROWS) * ROWS, dtype=torch.float32)
    docs = places.doc_start_block
    docs = q_proxy.new_empty(0, dtype=torch.int32) if docs is None else aligned(docs).view(-1)
    jit.load(DenseLse(heads))(q_proxy, k_proxy, docs, lse.view(-1), scale)
    return lse


def kl_pass(
    q: Tensor,
    k: Tensor,
    q_proxy: Tensor,
    k_proxy: Tensor,
    lse: Tensor,
    lse_proxy: Tensor,
    places: Places,
    scale: float,
    grad_kl: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The KL sum of each proxy head, and for a grad_kl dq_proxy and dk_proxy. Both lse are padded, base 2."""
    batch, n_queries, heads, _ = q.shape
    proxy_heads, kv_heads = q_proxy.shape[2], k.shape[2]
    blocks, tiles = -(-places.n_keys // BLOCK), -(-n_queries // ROWS)
    grads, device = grad_kl is not None, q.device
    # Where key blocks are few, their queries are cut into runs, so that all multiprocessors have work.
    key_items = batch * proxy_heads * blocks
    runs = min(tiles, max(1, -(-12 * multiprocessors(device) // key_items)))
    run_tiles = -(-tiles // runs)
    runs = -(-tiles // run_tiles)
    n_items = key_items * runs
    ordered = grads and torch.are_deterministic_algorithms_enabled()
    none = torch.empty(0, dtype=torch.int32, device=device)
    docs, ends = none, none
    if places.doc_start_block is not None:
        docs = aligned(places.doc_start_block)
        each = torch.arange(blocks, dtype=torch.int32, device=device).expand(batch, blocks).contiguous()
        ends = torch.searchsorted(docs, each, right=True, out_int32=True).view(-1)
        docs = docs.view(-1)
    parts = torch.empty(n_items if grads else 1, PART, device=device)
    sums = torch.zeros(batch * proxy_heads * tiles if grads else 1, TILE_SUM, device=device)
    handed_out = torch.zeros(1, dtype=torch.int32, device=device)
    turns = torch.zeros(batch * proxy_heads * tiles, dtype=torch.int32, device=device) if ordered else none
    item_kl = torch.empty(n_items, device=device)
    kl = torch.empty(proxy_heads, device=device)
    jit.load(DenseKl(heads, kv_heads, proxy_heads, grads, ordered))(
        q, k, q_proxy, k_proxy, lse.view(-1), lse_proxy.view(-1), docs, ends, parts, sums, item_kl,
        handed_out, turns, runs, run_tiles, scale, multiprocessors(device),
    )  # fmt: skip
    bucket_items = torch.arange(0, n_items + 1, runs, dtype=torch.int32, device=device)
    jit.load(SumKl(proxy_heads))(item_kl, bucket_items, kl, batch * blocks, 1)
    if not grads:
        return kl, None, None
    factor = aligned(grad_kl.float().reshape(1))
    dq_proxy = torch.empty_like(q_proxy)
    dk_proxy = k_proxy.new_empty(batch * blocks * BLOCK, 1, BLOCK)  # whole blocks
    jit.load(RoundQueries(proxy_heads))(sums, factor, dq_proxy, scale)
    jit.load(SumKeys(proxy_heads, 1, 1, times_grad_kl=True))(
        parts, bucket_items, parts, factor, dk_proxy, dk_proxy, 0, batch * blocks, scale, 1, 1
    )
    dk_proxy = dk_proxy.view(batch, -1, 1, BLOCK)[:, : places.n_keys].contiguous()
    return kl, dq_proxy, dk_proxy


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    doc_start_block: Tensor | None,
    q_block: Tensor | None,
    scale: float,
    materialize_kl: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out (B, S, H, D), kl, lse (B, H, S), lse_proxy (B, Hp, S) or empty), as `reference.forward`."""
    with torch.cuda.device(q.device):
        places = Places(q, k, doc_start_block, q_block)
        q, (k, v) = aligned(q), places.keys(k, v)
        out, lse = attend(q, k, v, places, scale)
        kl = torch.zeros((), device=q.device)
        if q_proxy is None:
            return out, kl, lse, lse.new_empty(0)
        q_proxy, (k_proxy,) = aligned(q_proxy), places.keys(k_proxy)
        lse_proxy = student_lse(q_proxy, k_proxy, places, scale)
        if materialize_kl:
            kl, _, _ = kl_pass(q, k, q_proxy, k_proxy, padded_lse(lse), lse_proxy, places, scale, None)
            kl = kl.sum()
        return out, kl, lse, lse_proxy[..., : q.shape[1]] * LN2


def backward(
    grad_out: Tensor | None,
    grad_kl: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    doc_start_block: Tensor | None,
    q_block: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_proxy: Tensor,
    scale: float,
    need_kl: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dq_proxy, dk_proxy, KL sum per head (Hp,)), as `reference.backward`."""
    with torch.cuda.device(q.device):
        places = Places(q, k, doc_start_block, q_block)
        all_keys = k.shape[1]
        q, (k, v) = aligned(q), places.keys(k, v)
        dq, dk, dv, dq_proxy, dk_proxy, kl = (lse.new_empty(0) for _ in range(6))
        if grad_out is not None:
            dq, dk, dv = attend_backward(aligned(grad_out), q, k, v, out, lse, places, scale)
        if q_proxy is not None and (grad_kl is not None or need_kl):
            q_proxy, (k_proxy,) = aligned(q_proxy), places.keys(k_proxy)
            lse2 = [padded_lse(x) for x in (lse, lse_proxy)]
            kl, *grads = kl_pass(q, k, q_proxy, k_proxy, *lse2, places, scale, grad_kl)
            if grad_kl is not None:
                dq_proxy, dk_proxy = grads
        # Keys behind the last query are seen by none.
        unseen = (0, 0, 0, 0, 0, all_keys - places.n_keys)
        if unseen[-1]:
            dk, dv, dk_proxy = (pad(x, unseen) if x.numel() else x for x in (dk, dv, dk_proxy))
        return dq, dk, dv, dq_proxy, dk_proxy, kl
