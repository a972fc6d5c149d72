"""Sparse attention on Hopper GPUs (sm_90): what runs the kernels, chunk by chunk.

Queries go through in chunks whose partial outputs fit into `workspace_bytes`: as many whole sequences as
fit, or a part of one. A chunk's selection is turned into work items (`schedule`), and each kernel walks
those. Workspaces are allocated here, call by call, so PyTorch's allocator shares them between layers. Nothing
waits for the GPU.

Batches are one long sequence to the kernels: keys of sequence b are blocks b * n .. (b + 1) * n, and a
selection never leaves its sequence. More than one sequence is therefore padded to whole blocks each; padded
queries select nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from msa.hopper import jit
from msa.hopper.backward import PART, TEACHER_GROUP, Backward, Prepare, SumKeys
from msa.hopper.device import BLOCK
from msa.hopper.forward import Combine, Forward
from msa.hopper.proxy import ProxyBackward, ProxyLse, SumKl
from msa.hopper.schedule import BuildSchedule, Schedule, make_schedule
from msa.hopper.select import Select, select_blocks

# For the partial outputs of a chunk of queries, the largest workspace: 98,304 queries of 16 heads, 16 slots.
workspace_bytes = 6 * 2**30

CHUNK_ALIGN = 1024  # rows that one CTA of the schedule reads


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Chunk:
    """Rows [first_row, first_row + n_rows) of the batch's queries, and the key blocks of their sequences."""

    first_row: int
    n_rows: int
    first_block: int
    n_blocks: int
    is_first: bool  # of its sequences
    is_last: bool


def chunks(batch: int, seq_len: int, key_blocks: int, row_bytes: int) -> Iterator[Chunk]:
    """Cuts the batch's rows, `row_bytes` of workspace each, into chunks of about equal size."""
    most = max(CHUNK_ALIGN, workspace_bytes // row_bytes // CHUNK_ALIGN * CHUNK_ALIGN)
    if seq_len <= most:
        step = min(batch, most // seq_len)
        for b in range(0, batch, step):
            n = min(step, batch - b)
            yield Chunk(b * seq_len, n * seq_len, b * key_blocks, n * key_blocks, True, True)
        return
    parts = -(-seq_len // most)
    step = -(-seq_len // parts // CHUNK_ALIGN) * CHUNK_ALIGN
    for b in range(batch):
        for begin in range(0, seq_len, step):
            n = min(step, seq_len - begin)
            is_last = begin + n == seq_len
            yield Chunk(b * seq_len + begin, n, b * key_blocks, key_blocks, begin == 0, is_last)


def item_cap(entries: int, device: torch.device) -> int:
    """Entries of a work item at most: about 12 items a multiprocessor, but enough to pay for its K and V."""
    each = max(1, entries // (12 * multiprocessors(device)))
    return min(2048, max(256, 1 << (each.bit_length() - 1)))


def aligned(x: Tensor) -> Tensor:
    """x as the kernels read it: contiguous, at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def pad_rows(x: Tensor, rows: int, value: float = 0) -> Tensor:
    """(B, S, ...) -> (B, rows, ...)"""
    if x.shape[1] < rows:
        x = pad(x, (0, 0) * (x.dim() - 2) + (0, rows - x.shape[1]), value=value)
    return aligned(x)


def padded_length(batch: int, length: int) -> int:
    return length if batch == 1 else -(-length // BLOCK) * BLOCK


class Call:
    """The inputs of one call as the kernels take them, and its shapes."""

    def __init__(self, q, k, v, q_proxy, k_proxy, block_indices, scale):
        self.batch, self.n_queries, self.heads, _ = q.shape
        self.n_keys, self.kv_heads = k.shape[1:3]
        self.proxy_heads, self.slots = block_indices.shape[2:]
        self.group = self.heads // self.proxy_heads
        self.seq_len = padded_length(self.batch, self.n_queries)
        keys = padded_length(self.batch, self.n_keys)
        self.key_blocks = -(-keys // BLOCK)
        self.device, self.scale = q.device, scale
        self.grid = multiprocessors(q.device)
        self.q = self.rows(q)
        self.k, self.v = (pad_rows(x, keys).view(-1, self.kv_heads, BLOCK) for x in (k, v))
        self.block_indices = pad_rows(block_indices, self.seq_len, -1).view(-1)
        if q_proxy is not None:
            self.q_proxy, self.k_proxy = self.rows(q_proxy), pad_rows(k_proxy, keys).view(-1, BLOCK)
        self.nothing = self.empty(4)  # what a kernel takes but, with the flags at hand, does not look at

    def rows(self, x: Tensor) -> Tensor:
        """(B, S, heads, D) -> (padded rows * heads, D)"""
        return pad_rows(x, self.seq_len).view(-1, BLOCK)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def unpad(self, x: Tensor, heads: int, length: int) -> Tensor:
        """(rows * heads, D) -> (B, length, heads, D)"""
        return x.view(self.batch, -1, heads, BLOCK)[:, :length].contiguous()

    def chunks(self) -> Iterator[Chunk]:
        return chunks(self.batch, self.seq_len, self.key_blocks, self.heads * self.slots * 2 * BLOCK)

    def largest(self) -> int:
        """Rows of the largest chunk."""
        return max(chunk.n_rows for chunk in self.chunks())

    def partial(self) -> Tensor:
        """Room for a bf16 row of each head and slot of a chunk's queries."""
        slots = self.largest() * self.proxy_heads * self.slots
        return self.empty(slots, self.group * BLOCK, dtype=torch.bfloat16)

    def schedule(self, chunk: Chunk) -> Schedule:
        entries = chunk.n_rows * self.proxy_heads * self.slots
        return make_schedule(
            self.block_indices.view(-1, self.proxy_heads, self.slots),
            chunk.first_row,
            chunk.n_rows,
            self.seq_len,
            self.key_blocks,
            item_cap(entries, self.device),
        )

    def teach(self, chunk, work, out, grad_out, lse, partial, parts, main: bool, teach: bool) -> Tensor:
        """Backward of the main branch on a chunk, the teacher, or both; returns the teacher."""
        padded = Prepare(self.heads, self.proxy_heads, main).padded
        stats = self.empty(chunk.n_rows * self.proxy_heads * 2 * padded)
        jit.load(Prepare(self.heads, self.proxy_heads, main))(
            out, grad_out, lse, stats, chunk.first_row, chunk.n_rows, self.seq_len
        )
        # The proxy reads tiles of 64 entries, which may end behind a list and so behind the last one.
        groups = work.entries.shape[0] // TEACHER_GROUP + 8 if teach else 1
        teacher = self.empty(groups, TEACHER_GROUP * BLOCK, dtype=torch.bfloat16)
        jit.load(Backward(self.heads, self.kv_heads, self.proxy_heads, self.slots, main, teach))(
            self.q, self.k, self.v, grad_out, stats, work.items, work.bucket_items, work.entries,
            partial, parts, teacher, chunk.first_row, self.scale, self.grid,
        )  # fmt: skip
        return teacher

    def learn(self, chunk, work, teacher, lse_proxy, partial, parts, kl, grads: bool, is_first: bool) -> None:
        """The proxy's KL on a chunk, added to `kl` (Hp,), and its gradients into partial and parts."""
        item_kl = self.empty(work.items.shape[0])
        jit.load(ProxyBackward(self.proxy_heads, self.slots, grads))(
            self.q_proxy, self.k_proxy, lse_proxy, teacher, work.items, work.bucket_items, work.entries,
            partial, parts, item_kl, chunk.first_row, self.seq_len, self.scale, self.grid,
        )  # fmt: skip
        jit.load(SumKl(self.proxy_heads))(item_kl, work.bucket_items, kl, chunk.n_blocks, int(is_first))


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
    with torch.cuda.device(q.device):
        call = Call(q, k, v, q_proxy, k_proxy, block_indices, scale)
        has_proxy = q_proxy is not None
        out = torch.empty_like(call.q)
        lse = call.empty(call.batch, call.heads, call.seq_len)
        lse_proxy = call.empty(call.batch, call.proxy_heads, call.seq_len) if has_proxy else call.empty(0)
        kl = torch.zeros(call.proxy_heads if materialize_kl else (), device=call.device)
        partial = call.partial()
        partial_lse, partial_lse_proxy = call.empty(partial.numel() // BLOCK), call.nothing
        for chunk in call.chunks():
            work = call.schedule(chunk)
            jit.load(Forward(call.heads, call.kv_heads, call.proxy_heads, call.slots))(
                call.q, call.k, call.v, work.items, work.bucket_items, work.entries,
                partial, partial_lse, chunk.first_row, scale, call.grid,
            )  # fmt: skip
            if has_proxy:
                partial_lse_proxy = call.empty(partial.shape[0])
                jit.load(ProxyLse(call.proxy_heads, call.slots))(
                    call.q_proxy, call.k_proxy, work.items, work.bucket_items, work.entries,
                    partial_lse_proxy, chunk.first_row, scale, call.grid,
                )  # fmt: skip
            jit.load(Combine(call.heads, call.proxy_heads, call.slots, softmax=True, with_proxy=has_proxy))(
                partial, partial_lse, partial_lse_proxy, call.block_indices, call.nothing, out, lse.view(-1),
                lse_proxy.view(-1) if has_proxy else call.nothing,
                chunk.first_row, chunk.n_rows, call.seq_len, 1.0,
            )  # fmt: skip
            if materialize_kl:
                no_parts = call.empty(1, 2 * PART)
                teacher = call.teach(chunk, work, out, out, lse.view(-1), partial, no_parts, False, True)
                call.learn(
                    chunk, work, teacher, lse_proxy.view(-1), partial.view(-1, BLOCK),
                    no_parts.view(-1, PART), kl, grads=False, is_first=chunk.first_row == 0,
                )  # fmt: skip
        n = call.n_queries
        return (
            call.unpad(out, call.heads, n),
            kl.sum() if materialize_kl else kl,
            lse[..., :n].contiguous(),
            lse_proxy[..., :n].contiguous() if has_proxy else lse_proxy,
        )


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
    with torch.cuda.device(q.device):
        call = Call(q, k, v, q_proxy, k_proxy, block_indices, scale)
        main = grad_out is not None
        proxy_grads = q_proxy is not None and grad_kl is not None
        proxy = q_proxy is not None and (grad_kl is not None or need_kl)
        heads, kv_heads, proxy_heads, slots = call.heads, call.kv_heads, call.proxy_heads, call.slots
        bf16 = torch.bfloat16
        dq = torch.empty_like(call.q) if main else call.empty(0)
        dk, dv = (torch.empty_like(call.k) if main else call.empty(0) for _ in range(2))
        dq_proxy = torch.empty_like(call.q_proxy) if proxy_grads else call.empty(0)
        dk_proxy = torch.empty_like(call.k_proxy).view(-1, 1, BLOCK) if proxy_grads else call.empty(0)
        kl = call.empty(proxy_heads if proxy else 0)
        if not (main or proxy):
            return dq, dk, dv, dq_proxy, dk_proxy, kl
        padding = (0, call.seq_len - call.n_queries)
        if padding[1]:
            lse, lse_proxy = (pad(x, padding) if x.numel() else x for x in (lse, lse_proxy))
        lse = aligned(lse).view(-1)
        lse_proxy = aligned(lse_proxy).view(-1) if proxy else call.nothing
        out = call.rows(out)
        grad_out = call.rows(grad_out) if main else out
        factor = grad_kl.float().reshape(1) if proxy_grads else call.nothing
        partial = call.partial() if main or proxy_grads else call.empty(1, call.group * BLOCK, dtype=bf16)
        # Sums over the chunks of a sequence: fp32, where there is more than one.
        whole = all(chunk.is_first and chunk.is_last for chunk in call.chunks())
        total = call.empty(1 if whole or not main else call.key_blocks * kv_heads, 2 * PART)
        total_proxy = call.empty(1 if whole or not proxy_grads else call.key_blocks, PART)
        for chunk in call.chunks():
            work = call.schedule(chunk)
            n_items = work.items.shape[0]
            parts = call.empty(n_items if main else 1, 2 * PART)
            teacher = call.teach(chunk, work, out, grad_out, lse, partial, parts, main, proxy)
            place = (chunk.first_block, chunk.n_blocks)
            ends = (int(chunk.is_first), int(chunk.is_last))
            rows = (chunk.first_row, chunk.n_rows, call.seq_len)
            if main:
                jit.load(Combine(heads, proxy_heads, slots, softmax=False))(
                    partial, call.nothing, call.nothing, call.block_indices, call.nothing,
                    dq, call.nothing, call.nothing, *rows, scale,
                )  # fmt: skip
                jit.load(SumKeys(proxy_heads, kv_heads, 2))(
                    parts, work.bucket_items, total, call.nothing, dk, dv, *place, scale, *ends
                )
            if proxy:
                # The proxy's partials are smaller, and the main branch is done with its own.
                partial_proxy = partial.view(-1, BLOCK)
                parts = parts.view(-1, PART) if main else call.empty(n_items if proxy_grads else 1, PART)
                is_first = chunk.first_row == 0
                call.learn(chunk, work, teacher, lse_proxy, partial_proxy, parts, kl, proxy_grads, is_first)
            if proxy_grads:
                jit.load(Combine(proxy_heads, proxy_heads, slots, softmax=False, times_grad_kl=True))(
                    partial_proxy, call.nothing, call.nothing, call.block_indices, factor,
                    dq_proxy, call.nothing, call.nothing, *rows, scale,
                )  # fmt: skip
                jit.load(SumKeys(proxy_heads, 1, 1, times_grad_kl=True))(
                    parts, work.bucket_items, total_proxy, factor, dk_proxy, dk_proxy, *place, scale, *ends
                )
            del parts, teacher, work  # before the next chunk allocates its own
        if main:
            dq = call.unpad(dq, heads, call.n_queries)
            dk, dv = (call.unpad(x, kv_heads, call.n_keys) for x in (dk, dv))
        if proxy_grads:
            dq_proxy = call.unpad(dq_proxy, proxy_heads, call.n_queries)
            dk_proxy = call.unpad(dk_proxy, 1, call.n_keys)
        return dq, dk, dv, dq_proxy, dk_proxy, kl


def select(
    q_proxy: Tensor,
    k_proxy: Tensor,
    doc_start_block: Tensor | None,
    q_block: Tensor | None,
    slots: int,
) -> Tensor:
    """Eq. 6 and 7: block_indices (B, S, Hp, slots) int32, ranked in fp32, as `reference.select`."""
    with torch.cuda.device(q_proxy.device):
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
    queries: Tensor, block_size: int, slots: int | None, group: int, proxy_kv_heads: int
) -> str | None:
    """Why the kernels don't take a call, None if they do. slots None: dense attention."""
    if queries.dtype != torch.bfloat16:
        return f"the kernels take bfloat16, not {str(queries.dtype).removeprefix('torch.')}"
    if queries.shape[3] != BLOCK or block_size != BLOCK:
        return f"the kernels take head_dim and block_size {BLOCK}, not {queries.shape[3]} and {block_size}"
    if slots is None:
        return "dense and warmup attention have no kernels yet"
    if slots > 32:
        return f"the kernels take a top_k of at most {32 * BLOCK} tokens, not {slots * BLOCK}"
    if group > 16:
        return f"the kernels take at most 16 query heads a proxy head, not {group}"
    if proxy_kv_heads != 1:
        return f"the kernels take one k_proxy head, not {proxy_kv_heads}"
    return None


def all_kernels() -> list:
    """The kernels of one configuration, and of others what differs in more than a number."""
    heads, kv_heads, proxy_heads, slots = 16, 2, 2, 16
    kernels = [
        Select(proxy_heads, slots),
        BuildSchedule(proxy_heads, slots),
        Forward(heads, kv_heads, proxy_heads, slots),
        ProxyLse(proxy_heads, slots),
        Combine(heads, proxy_heads, slots, softmax=True, with_proxy=True),
        Combine(heads, proxy_heads, slots, softmax=False),
        Combine(proxy_heads, proxy_heads, slots, softmax=False, times_grad_kl=True),
        Prepare(heads, proxy_heads, main=True),
        Backward(heads, kv_heads, proxy_heads, slots, main=True, teach=True),
        SumKeys(proxy_heads, kv_heads, 2),
        ProxyBackward(proxy_heads, slots, grads=True),
        SumKeys(proxy_heads, 1, 1, times_grad_kl=True),
        SumKl(proxy_heads),
        # the KL's value alone, and attention without a proxy
        Prepare(heads, proxy_heads, main=False),
        Backward(heads, kv_heads, proxy_heads, slots, main=False, teach=True),
        ProxyBackward(proxy_heads, slots, grads=False),
        Combine(heads, proxy_heads, slots, softmax=True),
        Backward(heads, kv_heads, proxy_heads, slots, main=True, teach=False),
    ]
    for group in (1, 3, 4, 16):  # tiles hold 32, 32, 32 and 8 queries
        kernels += [
            Forward(2 * group, 2, 2, slots),
            Combine(2 * group, 2, slots, softmax=True, with_proxy=True),
            Backward(2 * group, 2, 2, slots, main=True, teach=True),
            Prepare(2 * group, 2, main=True),
        ]
    for slots in (1, 2, 32):
        kernels += [
            Select(proxy_heads, slots),
            BuildSchedule(proxy_heads, slots),
            Forward(heads, kv_heads, proxy_heads, slots),
            Combine(heads, proxy_heads, slots, softmax=True, with_proxy=True),
        ]
    return kernels
