"""Sparse attention on Hopper GPUs (sm_90): what runs the kernels, chunk by chunk. `dense` is for the rest.

Queries go through in chunks whose partial outputs fit into `workspace_bytes`: as many whole sequences as
fit, or a part of one. A chunk's selection is turned into work items (`schedule`), and each kernel walks
those. Workspaces are allocated here, call by call, so PyTorch's allocator shares them between layers. Nothing
waits for the GPU.

Batches are one long sequence to the kernels: keys of sequence b are blocks b * n .. (b + 1) * n, and a
selection never leaves its sequence. More than one sequence is therefore padded to whole blocks each; padded
queries select nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from msa.hopper import dense as dense  # what runs without a selection
from msa.hopper import jit
from msa.hopper.backward import PART, SumKeys
from msa.hopper.chunk import UNIT, Plan, SparseBackward, SparseForward, plan
from msa.hopper.dense_kl import DenseKl, DenseLse, RoundQueries
from msa.hopper.device import BLOCK
from msa.hopper.launch import aligned, multiprocessors, nothing
from msa.hopper.proxy import SumKl
from msa.hopper.select import Select, select_blocks

# For the partial outputs of a chunk of queries, the largest workspace: 98,304 queries of 16 heads, 16 slots.
workspace_bytes = 6 * 2**30


def pad_rows(x: Tensor, rows: int, value: float = 0) -> Tensor:
    """(B, S, ...) -> (B, rows, ...)"""
    if x.shape[1] < rows:
        x = pad(x, (0, 0) * (x.dim() - 2) + (0, rows - x.shape[1]), value=value)
    return aligned(x)


def unpad(x: Tensor, rows: int) -> Tensor:
    """What `pad_rows` was given."""
    return x if x.shape[1] == rows else x[:, :rows].contiguous()


def padded_length(batch: int, length: int) -> int:
    return length if batch == 1 else -(-length // BLOCK) * BLOCK


class Call:
    """The inputs of one call as the kernels take them, and its shapes."""

    def __init__(self, q, k, v, q_proxy, k_proxy, block_indices, scale):
        self.batch, self.n_queries, self.heads, _ = q.shape
        self.n_keys, self.kv_heads = k.shape[1:3]
        self.proxy_heads, self.slots = block_indices.shape[2:]
        self.seq_len = padded_length(self.batch, self.n_queries)
        self.keys = padded_length(self.batch, self.n_keys)
        self.device, self.scale = q.device, scale
        self.grid = multiprocessors(q.device)
        self.q = pad_rows(q, self.seq_len)
        self.k, self.v = pad_rows(k, self.keys), pad_rows(v, self.keys)
        self.block_indices = pad_rows(block_indices, self.seq_len, -1)
        # Without a proxy the kernels still take these two, and don't look at them.
        self.q_proxy = self.q if q_proxy is None else pad_rows(q_proxy, self.seq_len)
        self.k_proxy = self.q if k_proxy is None else pad_rows(k_proxy, self.keys)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def plan(self, *kind: int) -> tuple[Plan, Tensor]:
        """How the rows are cut, and a workspace for a pass of this kind."""
        where = plan(
            self.batch, self.seq_len, -(-self.keys // BLOCK), self.heads, self.proxy_heads, self.slots,
            self.grid, workspace_bytes, kind,
        )  # fmt: skip
        shape = (where.workspace // UNIT, UNIT // 4)
        return where, torch.empty(shape, dtype=torch.int32, device=self.device)

    def tensors(self, workspace: Tensor, out: Tensor, lse: Tensor, lse_proxy: Tensor) -> tuple[Tensor, ...]:
        """What both passes begin with."""
        return (
            self.q, self.k, self.v, self.q_proxy, self.k_proxy, self.block_indices, workspace,
            out, lse, lse_proxy if lse_proxy.numel() else lse,
        )  # fmt: skip

    def backward(self, out, lse, lse_proxy, grad_out, grad_kl, need_kl: bool) -> tuple[Tensor | None, ...]:
        """dq, dk, dv, dq_proxy, dk_proxy and kl, in whole blocks; None for what no gradient was given."""
        main, proxy_grads = grad_out is not None, grad_kl is not None
        proxy = proxy_grads or need_kl
        shape = (self.heads, self.kv_heads, self.proxy_heads, self.slots)
        kernel = jit.load(SparseBackward(*shape, main, proxy, proxy_grads))
        where, workspace = self.plan(
            int(main or proxy_grads), 0, 1, int(proxy), 2 if main else int(proxy_grads)
        )
        inputs = (self.q, self.k, self.v, self.q_proxy, self.k_proxy)
        wanted = (main, main, main, proxy_grads, proxy_grads)
        grads = [torch.empty_like(x) if yes else None for x, yes in zip(inputs, wanted, strict=True)]
        targets = [x if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]
        kl = self.empty(self.proxy_heads if proxy else 0)
        # Sums over the chunks of a sequence: fp32, where there is more than one.
        total = total_proxy = None
        if where.total_blocks and main:
            total = self.empty(where.total_blocks * self.kv_heads, 2 * PART)
        if where.total_blocks and proxy_grads:
            total_proxy = self.empty(where.total_blocks, PART)
        arguments = (
            *self.tensors(workspace, out, lse, lse_proxy),
            grad_out if main else out,
            # One element of a larger gradient (of stacked KLs, say) may lie anywhere.
            aligned(grad_kl.float().reshape(1)) if proxy_grads else kl,
            *targets,
            kl,
            nothing(self.device, torch.float32, 2 * PART) if total is None else total,
            nothing(self.device, torch.float32, PART) if total_proxy is None else total_proxy,
            self.scale,
            self.grid,
        )
        for numbers in where.chunks:
            kernel(*arguments, *numbers)
        return *grads, kl


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    block_indices: Tensor,
    scale: float,
    materialize_kl: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out (B, S, H, D), kl, lse (B, H, S), lse_proxy (B, Hp, S) or empty), as `reference.forward`."""
    with torch.cuda.device(q.get_device()):
        call = Call(q, k, v, q_proxy, k_proxy, block_indices, scale)
        has_proxy = q_proxy is not None
        out = torch.empty_like(call.q)
        lse = call.empty(call.batch, call.heads, call.seq_len)
        lse_proxy = call.empty(call.batch, call.proxy_heads, call.seq_len) if has_proxy else call.empty(0)
        shape = (call.heads, call.kv_heads, call.proxy_heads, call.slots)
        kernel = jit.load(SparseForward(*shape, has_proxy))
        where, workspace = call.plan(1, 1, 0, 0, 0)
        kl = call.empty()
        arguments = (*call.tensors(workspace, out, lse, lse_proxy), kl.view(1), scale, call.grid)
        for numbers in where.chunks:
            kernel(*arguments, *numbers)
        del arguments, workspace
        if materialize_kl:
            *_, kl = call.backward(out, lse, lse_proxy, None, None, need_kl=True)
            kl = kl.sum()
        out = unpad(out, call.n_queries)
        if call.seq_len > call.n_queries:
            lse = lse[..., : call.n_queries].contiguous()
            lse_proxy = lse_proxy[..., : call.n_queries].contiguous() if has_proxy else lse_proxy
        return out, kl, lse, lse_proxy


def backward(
    grad_out: Tensor | None,
    grad_kl: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    block_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_proxy: Tensor,
    scale: float,
    need_kl: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dq_proxy, dk_proxy, KL sum per head (Hp,)), as `reference.backward`."""
    with torch.cuda.device(q.get_device()):
        if q_proxy is None:
            grad_kl, need_kl = None, False
        if grad_out is None and grad_kl is None and not need_kl:
            return tuple(lse.new_empty(0) for _ in range(6))
        call = Call(q, k, v, q_proxy, k_proxy, block_indices, scale)
        padding = (0, call.seq_len - call.n_queries)
        if padding[1]:
            lse, lse_proxy = (pad(x, padding) if x.numel() else x for x in (lse, lse_proxy))
        if grad_out is not None:
            grad_out = pad_rows(grad_out, call.seq_len)
        *grads, kl = call.backward(
            pad_rows(out, call.seq_len), aligned(lse), aligned(lse_proxy), grad_out, grad_kl, need_kl
        )
        lengths = (call.n_queries, call.n_keys, call.n_keys, call.n_queries, call.n_keys)
        grads = [lse.new_empty(0) if x is None else unpad(x, n) for x, n in zip(grads, lengths, strict=True)]
        return *grads, kl


def select(
    q_proxy: Tensor,
    k_proxy: Tensor,
    doc_start_block: Tensor | None,
    q_block: Tensor | None,
    slots: int,
) -> Tensor:
    """Eq. 6 and 7: block_indices (B, S, Hp, slots) int32, ranked in fp32, as `reference.select`."""
    with torch.cuda.device(q_proxy.get_device()):
        batch, n_queries, _, _ = q_proxy.shape
        rows = padded_length(batch, n_queries)
        chosen = select_blocks(
            pad_rows(q_proxy, rows),
            pad_rows(k_proxy, padded_length(batch, k_proxy.shape[1])),
            None if q_block is None else aligned(q_block),
            None if doc_start_block is None else aligned(doc_start_block),
            slots,
        )
        return chosen if rows == n_queries else chosen[:, :n_queries].contiguous()


def why_not(
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    slots: int | None,
    group: int,
    proxy_key_heads: int | None,
) -> str | None:
    """Why the kernels don't take a call, None if they do. `slots` is None for dense attention, `group` the
    query heads that share a proxy head, `proxy_key_heads` None without a proxy."""
    if dtype != torch.bfloat16:
        return f"the kernels take bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim != BLOCK or block_size != BLOCK:
        return f"the kernels take head_dim and block_size {BLOCK}, not {head_dim} and {block_size}"
    if slots is not None and slots > 32:
        return f"the kernels take a top_k of at most {32 * BLOCK} tokens, not {slots * BLOCK}"
    if group > 16:
        return f"the kernels take at most 16 query heads a proxy head, not {group}"
    if proxy_key_heads not in (None, 1):
        return f"the kernels take one k_proxy head, not {proxy_key_heads}"
    return None


def workspace_of(
    batch: int,
    seq_len: int,
    heads: int,
    kv_heads: int,
    proxy_heads: int | None,
    slots: int | None,
    device: torch.device,
) -> int:
    """Bytes of backward's workspace; of the dense kernels about."""
    tokens = batch * padded_length(batch, seq_len)
    if slots is None or proxy_heads is None:
        # FlashAttention-4: dq, dk and dv in fp32. The KL: a part for each key block, and dq_proxy in fp32.
        flash = tokens * ((heads + 2 * kv_heads) * 4 * BLOCK + 8 * heads)
        return max(flash, tokens * (proxy_heads or 0) * 2 * 4 * BLOCK)
    blocks, length = -(-seq_len // BLOCK), padded_length(batch, seq_len)
    where = plan(
        batch, length, blocks, heads, proxy_heads, slots, multiprocessors(device), workspace_bytes,
        (1, 0, 1, 1, 2),
    )  # fmt: skip
    return where.workspace + 4 * PART * where.total_blocks * (2 * kv_heads + 1)


def all_kernels() -> list:
    """Every kernel, for one configuration."""
    heads, kv_heads, proxy_heads, slots = shape = (16, 2, 2, 16)
    return [
        Select(proxy_heads, slots),
        SparseForward(*shape, with_proxy=True),
        SparseBackward(*shape, main=True, proxy=True, proxy_grads=True),
        DenseLse(proxy_heads),
        DenseKl(heads, kv_heads, proxy_heads, grads=True),
        RoundQueries(proxy_heads),
        SumKl(proxy_heads),
        SumKeys(proxy_heads, 1, 1, times_grad_kl=True),
        # the KL's value alone, attention without a proxy, and a fixed order of sums
        SparseBackward(*shape, main=False, proxy=True, proxy_grads=False),
        SparseForward(*shape, with_proxy=False),
        SparseBackward(*shape, main=True, proxy=False, proxy_grads=False),
        DenseKl(heads, kv_heads, proxy_heads, grads=False),
        DenseKl(heads, kv_heads, proxy_heads, grads=True, ordered=True),
    ]


def other_kernels() -> list:
    """Those of other configurations that differ in more than a number."""
    heads, kv_heads, proxy_heads, slots = 16, 2, 2, 16
    kernels = []
    for group in (1, 3, 4, 16):  # tiles hold 32, 32, 32 and 8 queries
        kernels += [
            SparseForward(2 * group, 2, 2, slots, with_proxy=True),
            SparseBackward(2 * group, 2, 2, slots, main=True, proxy=True, proxy_grads=True),
            DenseKl(2 * group, 2, 2, grads=True),
        ]
    for slots in (1, 2, 32):
        kernels += [
            Select(proxy_heads, slots),
            SparseForward(heads, kv_heads, proxy_heads, slots, with_proxy=True),
            SparseBackward(heads, kv_heads, proxy_heads, slots, main=True, proxy=True, proxy_grads=True),
        ]
    return kernels
