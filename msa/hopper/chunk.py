"""A chunk of queries in one call: all that sparse attention launches for it, forward or backward.

One call from Python instead of one a kernel, tensors in the shapes that they have instead of views, and one
workspace instead of a tensor for each thing that lies between the kernels: at short lengths the host's time
would count otherwise. `plan` says where things lie.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from msa.hopper import device, jit
from msa.hopper.backward import PART, TEACHER_GROUP, Backward, Prepare, SumKeys
from msa.hopper.device import BLOCK, ITEM_FIELDS
from msa.hopper.forward import Combine, Forward
from msa.hopper.proxy import ProxyBackward, ProxyLse, SumKl
from msa.hopper.schedule import BuildSchedule, Chunk

ALIGN = 1024  # rows that one CTA of the schedule reads
UNIT = 256  # bytes that a place in the workspace is a multiple of
PLACES = 9  # of what lies in the workspace


class Plan(NamedTuple):
    workspace: int  # bytes, of the largest chunk
    chunks: tuple[tuple[int, ...], ...]  # what the kernels are called with, from first_row to the last place
    total_blocks: int  # key blocks whose sums are kept from chunk to chunk; 0 if no sequence is cut


def item_cap(entries: int, grid: int) -> int:
    """Entries of a work item at most: about 12 items a multiprocessor, but enough to pay for its K and V."""
    each = max(1, entries // (12 * grid))
    return min(2048, max(256, 1 << (each.bit_length() - 1)))


@functools.lru_cache(maxsize=1024)
def plan(
    batch: int,
    seq_len: int,
    key_blocks: int,
    heads: int,
    proxy_heads: int,
    slots: int,
    grid: int,
    budget: int,
    kind: tuple[int, ...],
) -> Plan:
    """Cuts the batch's rows into chunks of about equal size whose partial outputs fit into `budget` bytes.

    A chunk is some whole sequences, or a part of one. `kind` says what the pass keeps in its workspace:
    partials, their lse, the stats of Prepare, a teacher, and how many multiples of PART by item.
    """
    partials, lse, stats, teacher, parts = kind
    row_bytes = heads * slots * 2 * BLOCK
    most = max(ALIGN, budget // row_bytes // ALIGN * ALIGN)
    spans = []  # (first row, rows)
    if seq_len <= most:
        step = min(batch, most // seq_len) * seq_len
        spans = [(row, min(step, batch * seq_len - row)) for row in range(0, batch * seq_len, step)]
    else:
        step = -(-seq_len // -(-seq_len // most) // ALIGN) * ALIGN
        for b in range(batch):
            spans += [(b * seq_len + row, min(step, seq_len - row)) for row in range(0, seq_len, step)]
    chunks, workspace, whole = [], 0, True
    group = heads // proxy_heads
    for first_row, n_rows in spans:
        edges = n_rows * proxy_heads * slots
        cap = item_cap(edges, grid)
        chunk = Chunk.of(batch * seq_len, proxy_heads, slots, first_row, n_rows, seq_len, key_blocks, cap)
        sizes = (
            4 * chunk.capacity,  # entries
            4 * ITEM_FIELDS * chunk.max_items,
            4 * (proxy_heads * chunk.n_blocks + 1),  # bucket_items
            4 * chunk.scratch,
            row_bytes * n_rows * partials,
            4 * edges * (group + 1) if lse else 4 * chunk.max_items,  # lse partials, or the KL by item
            8 * n_rows * proxy_heads * device.padded_group(group) * stats,
            # The proxy reads tiles of 64 entries, which may end behind a list and so behind the last one.
            2 * BLOCK * (chunk.capacity + 64) * teacher,
            4 * PART * chunk.max_items * parts,
        )
        places, end = [], 0
        for size in sizes:
            places.append(end)
            end += -(-size // UNIT) * UNIT
        workspace = max(workspace, end)
        is_first, is_last = first_row % seq_len == 0, (first_row + n_rows) % seq_len == 0
        numbers = (
            first_row, n_rows, chunk.row_offset, seq_len, key_blocks, chunk.first_block, chunk.n_blocks,
            chunk.columns, cap, chunk.max_items, int(is_first), int(is_last), *places,
        )  # fmt: skip
        chunks.append(numbers)
        whole &= is_first and is_last
    return Plan(workspace, tuple(chunks), 0 if whole else key_blocks)


def numbers():
    """Stand-ins for those of a chunk of Plan."""
    return *(Int32(1) for _ in range(12)), *(Int64(0) for _ in range(PLACES))


def tensors(kernel):
    """Stand-ins for what both passes begin with. Without a proxy any tensors stand in its places."""
    heads, kv_heads, proxy_heads, slots = kernel.heads, kernel.kv_heads, kernel.proxy_heads, kernel.slots
    return (
        jit.batch("bf16", heads, BLOCK),  # q (B, S, H, D)
        jit.batch("bf16", kv_heads, BLOCK),  # k (B, Sk, Hkv, D)
        jit.batch("bf16", kv_heads, BLOCK),  # v
        jit.batch("bf16", cute.sym_int(), BLOCK),  # q_proxy (B, S, Hp, D)
        jit.batch("bf16", cute.sym_int(), BLOCK),  # k_proxy (B, Sk, 1, D)
        jit.batch("i32", proxy_heads, slots),  # block_indices (B, S, Hp, k)
        jit.tensor("i32", UNIT // 4),  # workspace: rows, for at 1M tokens it has more than 2^31 ints
        jit.batch("bf16", heads, BLOCK),  # out (B, S, H, D)
        jit.batch("f32", cute.sym_int()),  # lse (B, H, S)
        jit.batch("f32", cute.sym_int()),  # lse_proxy (B, Hp, S)
    )


def piece(workspace, place, dtype, length, *shape):
    """A contiguous (length, *shape) tensor, `place` bytes into the workspace."""
    pointer = cute.make_ptr(
        dtype, workspace.iterator.toint() + place, cute.AddressSpace.gmem, assumed_align=16
    )
    return device.contiguous(pointer, length, *shape)


def build_schedule(
    kernel, workspace, block_indices, first_row, n_rows, row_offset, seq_len, key_blocks, first_block,
    n_blocks, columns, cap, max_items, places, stream,
):  # fmt: skip
    """Launches the schedule; returns its entries, items and bucket_items."""
    heads, slots = kernel.proxy_heads, kernel.slots
    entries = piece(workspace, places[0], Int32, 1)
    items = piece(workspace, places[1], Int32, max_items, ITEM_FIELDS)
    bucket_items = piece(workspace, places[2], Int32, heads * n_blocks + 1)
    scratch = piece(workspace, places[3], Int32, 1)
    indices = device.global_pointer(block_indices, Int64(first_row) * (heads * slots), Int32, 4)
    indices = cute.make_tensor(
        indices, cute.make_layout((n_rows, heads, slots), stride=(heads * slots, slots, 1))
    )
    kernel(
        indices, entries, items, bucket_items, scratch, n_rows, row_offset, seq_len, key_blocks, first_block,
        n_blocks, columns, cap, stream,
    )  # fmt: skip
    return entries, items, bucket_items


@dataclass(unsafe_hash=True)
class SparseForward:
    """out, lse and, with a proxy, lse_proxy of a chunk's queries; kl, which is 0."""

    heads: int
    kv_heads: int
    proxy_heads: int
    slots: int
    with_proxy: bool

    def arguments(self):
        return (
            *tensors(self),
            jit.tensor("f32"),  # kl, one element
            Float32(1.0),  # scale
            Int32(1),  # multiprocessors
            *numbers(),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        q_proxy: cute.Tensor,
        k_proxy: cute.Tensor,
        block_indices: cute.Tensor,
        workspace: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        lse_proxy: cute.Tensor,
        kl: cute.Tensor,
        scale: Float32,
        grid: Int32,
        first_row: Int32,
        n_rows: Int32,
        row_offset: Int32,
        seq_len: Int32,
        key_blocks: Int32,
        first_block: Int32,
        n_blocks: Int32,
        columns: Int32,
        cap: Int32,
        max_items: Int32,
        is_first: Int32,
        is_last: Int32,
        at_entries: Int64,
        at_items: Int64,
        at_buckets: Int64,
        at_scratch: Int64,
        at_partial: Int64,
        at_lse: Int64,
        at_stats: Int64,
        at_teacher: Int64,
        at_parts: Int64,
        stream,
    ):
        heads, kv_heads, proxy_heads, slots = self.heads, self.kv_heads, self.proxy_heads, self.slots
        q, q_proxy, k_proxy, out = [device.flatten(x, BLOCK) for x in (q, q_proxy, k_proxy, out)]
        k, v = [device.flatten(x, kv_heads, BLOCK) for x in (k, v)]
        block_indices, lse, lse_proxy = [device.flatten(x) for x in (block_indices, lse, lse_proxy)]
        entries, items, bucket_items = build_schedule(
            BuildSchedule(proxy_heads, slots), workspace, block_indices, first_row, n_rows, row_offset,
            seq_len, key_blocks, first_block, n_blocks, columns, cap, max_items,
            (at_entries, at_items, at_buckets, at_scratch), stream,
        )  # fmt: skip
        group = heads // proxy_heads
        edges = n_rows * (proxy_heads * slots)
        partial = piece(workspace, at_partial, BFloat16, edges, group * BLOCK)
        partial_lse = piece(workspace, at_lse, Float32, edges * group)
        partial_lse_proxy = piece(workspace, at_lse + Int64(edges) * (4 * group), Float32, edges)
        Forward(heads, kv_heads, proxy_heads, slots)(
            q, k, v, items, bucket_items, entries, partial, partial_lse, first_row, scale, grid, stream
        )
        if const_expr(self.with_proxy):
            ProxyLse(proxy_heads, slots)(
                q_proxy,
                k_proxy,
                items,
                bucket_items,
                entries,
                partial_lse_proxy,
                first_row,
                scale,
                grid,
                stream,
            )
        Combine(heads, proxy_heads, slots, softmax=True, with_proxy=self.with_proxy)(
            partial, partial_lse, partial_lse_proxy, block_indices, kl, out, lse, lse_proxy,
            first_row, n_rows, seq_len, Float32(1.0), stream,
        )  # fmt: skip


@dataclass(unsafe_hash=True)
class SparseBackward:
    """Of a chunk's queries: `main` makes dq, dk, dv, `proxy` the KL, `proxy_grads` dq_proxy and dk_proxy."""

    heads: int
    kv_heads: int
    proxy_heads: int
    slots: int
    main: bool
    proxy: bool
    proxy_grads: bool

    def arguments(self):
        return (
            *tensors(self),
            jit.batch("bf16", self.heads, BLOCK),  # grad_out (B, S, H, D)
            jit.tensor("f32"),  # gradient of kl, one element
            jit.batch("bf16", self.heads, BLOCK),  # dq
            jit.batch("bf16", self.kv_heads, BLOCK),  # dk
            jit.batch("bf16", self.kv_heads, BLOCK),  # dv
            jit.batch("bf16", cute.sym_int(), BLOCK),  # dq_proxy
            jit.batch("bf16", cute.sym_int(), BLOCK),  # dk_proxy
            jit.tensor("f32"),  # kl (Hp,)
            jit.tensor("f32", 2 * PART),  # total of dk and dv from chunk to chunk
            jit.tensor("f32", PART),  # of dk_proxy
            Float32(1.0),  # scale
            Int32(1),  # multiprocessors
            *numbers(),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        q_proxy: cute.Tensor,
        k_proxy: cute.Tensor,
        block_indices: cute.Tensor,
        workspace: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        lse_proxy: cute.Tensor,
        grad_out: cute.Tensor,
        grad_kl: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dq_proxy: cute.Tensor,
        dk_proxy: cute.Tensor,
        kl: cute.Tensor,
        total: cute.Tensor,
        total_proxy: cute.Tensor,
        scale: Float32,
        grid: Int32,
        first_row: Int32,
        n_rows: Int32,
        row_offset: Int32,
        seq_len: Int32,
        key_blocks: Int32,
        first_block: Int32,
        n_blocks: Int32,
        columns: Int32,
        cap: Int32,
        max_items: Int32,
        is_first: Int32,
        is_last: Int32,
        at_entries: Int64,
        at_items: Int64,
        at_buckets: Int64,
        at_scratch: Int64,
        at_partial: Int64,
        at_kl: Int64,
        at_stats: Int64,
        at_teacher: Int64,
        at_parts: Int64,
        stream,
    ):
        heads, kv_heads, proxy_heads, slots = self.heads, self.kv_heads, self.proxy_heads, self.slots
        q, q_proxy, k_proxy, out, grad_out, dq, dq_proxy = [
            device.flatten(x, BLOCK) for x in (q, q_proxy, k_proxy, out, grad_out, dq, dq_proxy)
        ]
        k, v, dk, dv = [device.flatten(x, kv_heads, BLOCK) for x in (k, v, dk, dv)]
        dk_proxy = device.flatten(dk_proxy, 1, BLOCK)
        block_indices, lse, lse_proxy = [device.flatten(x) for x in (block_indices, lse, lse_proxy)]
        entries, items, bucket_items = build_schedule(
            BuildSchedule(proxy_heads, slots), workspace, block_indices, first_row, n_rows, row_offset,
            seq_len, key_blocks, first_block, n_blocks, columns, cap, max_items,
            (at_entries, at_items, at_buckets, at_scratch), stream,
        )  # fmt: skip
        group = heads // proxy_heads
        edges = n_rows * (proxy_heads * slots)
        partial = piece(workspace, at_partial, BFloat16, edges, group * BLOCK)
        parts = piece(workspace, at_parts, Float32, max_items, 2 * PART)
        stats = piece(workspace, at_stats, Float32, 1)
        teacher = piece(workspace, at_teacher, BFloat16, 1, TEACHER_GROUP * BLOCK)
        Prepare(heads, proxy_heads, self.main)(out, grad_out, lse, stats, first_row, n_rows, seq_len, stream)
        Backward(heads, kv_heads, proxy_heads, slots, self.main, self.proxy)(
            q, k, v, grad_out, stats, items, bucket_items, entries, partial, parts, total, teacher, first_row,
            first_block, n_blocks, is_first, is_last, scale, grid, stream,
        )  # fmt: skip
        if const_expr(self.main):
            Combine(heads, proxy_heads, slots, softmax=False)(
                partial, stats, stats, block_indices, stats, dq, stats, stats, first_row, n_rows, seq_len,
                scale, stream,
            )  # fmt: skip
            SumKeys(proxy_heads, kv_heads, 2)(
                parts,
                bucket_items,
                total,
                stats,
                dk,
                dv,
                first_block,
                n_blocks,
                scale,
                is_first,
                is_last,
                stream,
            )
        if const_expr(self.proxy):
            # The proxy's partials and parts are smaller than the main branch's, which is done with its own.
            partial_proxy = piece(workspace, at_partial, BFloat16, edges, BLOCK)
            parts_proxy = piece(workspace, at_parts, Float32, max_items, PART)
            item_kl = piece(workspace, at_kl, Float32, max_items)
            ProxyBackward(proxy_heads, slots, self.proxy_grads)(
                q_proxy, k_proxy, lse_proxy, teacher, items, bucket_items, entries, partial_proxy,
                parts_proxy, item_kl, first_row, seq_len, scale, grid, stream,
            )  # fmt: skip
            first_chunk = Int32(first_row == 0)
            SumKl(proxy_heads)(item_kl, bucket_items, kl, n_blocks, first_chunk, stream)
            if const_expr(self.proxy_grads):
                Combine(proxy_heads, proxy_heads, slots, softmax=False, times_grad_kl=True)(
                    partial_proxy, stats, stats, block_indices, grad_kl, dq_proxy, stats, stats,
                    first_row, n_rows, seq_len, scale, stream,
                )  # fmt: skip
                SumKeys(proxy_heads, 1, 1, times_grad_kl=True)(
                    parts_proxy, bucket_items, total_proxy, grad_kl, dk_proxy, dk_proxy, first_block,
                    n_blocks, scale, is_first, is_last, stream,
                )  # fmt: skip
