"""Sparse attention forward, key blocks outside: eq. 8 of arXiv 2606.13392.

A work item is a key block and a list of (query, slot) entries that chose it. K and V of the block stay in
shared memory while the queries' rows (the G heads of a group) are gathered into tiles of 128 rows. One block
is one softmax: no running maximum. The normalised output goes out in bf16 to the entry's own slot, with the
logarithm of its weight; `Combine` merges the slots of a query. No atomic touches a result: the same input
gives the same bits.

Partial layout, elements of a slot: [j 0..3][head 0..G-1][t 0..3][8]. Thread t of a quad holds the columns
8 * (4 * j + i) + 2 * t + {0, 1}, i = 0..3, of its row: what the accumulator holds, in 16-byte stores.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from quack import copy_utils, layout_utils, sm90_utils

from msa.hopper import device, jit
from msa.hopper.device import BLOCK, CONSUMERS, ITEM_FIELDS, LN2, LOG2E, QUERY_MASK

ROWS = 128  # of a query tile
Q_STAGES = 3
KV_STAGES = 2
ROW_BYTES = 2 * BLOCK


@dataclass(unsafe_hash=True)
class Forward:
    heads: int
    kv_heads: int
    proxy_heads: int
    slots: int

    def __post_init__(self):
        self.group = self.heads // self.proxy_heads
        self.padded = device.padded_group(self.group)
        self.tile_queries = ROWS // self.padded

    def arguments(self):
        return (
            jit.tensor("bf16", BLOCK),  # q: (rows * H, D), rows = B * S
            jit.tensor("bf16", self.kv_heads, BLOCK),  # k: (keys, Hkv, D)
            jit.tensor("bf16", self.kv_heads, BLOCK),  # v
            jit.tensor("i32", ITEM_FIELDS),  # items
            jit.tensor("i32"),  # bucket_items, whose last entry is the number of items
            jit.tensor("i32"),  # entries
            jit.tensor("bf16", self.group * BLOCK),  # out partials, by (query, proxy head, slot)
            jit.tensor("f32"),  # lse partials, base 2
            Int32(0),  # first row of the chunk
            Float32(1.0),  # scale
            Int32(1),  # multiprocessors
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        items: cute.Tensor,
        bucket_items: cute.Tensor,
        entries: cute.Tensor,
        partial: cute.Tensor,
        partial_lse: cute.Tensor,
        first_row: Int32,
        scale: Float32,
        grid: Int32,
        stream,
    ):
        k, v = [layout_utils.select(x, [0, 2, 1]) for x in (k, v)]  # (keys, D, Hkv)
        mma_qk = sm90_utils.make_tiled_mma(BFloat16, "K", "K", BLOCK, atom_layout_mnk=(2, 1, 1))
        mma_pv = sm90_utils.make_tiled_mma(BFloat16, "K", "MN", BLOCK, source="RS", atom_layout_mnk=(2, 1, 1))
        q_layout = device.rows_layout(ROWS, Q_STAGES)
        kv_layout = sm90_utils.make_smem_layout(BFloat16, LayoutEnum.ROW_MAJOR, (BLOCK, BLOCK), KV_STAGES)
        tile = cute.select(kv_layout, mode=[0, 1])
        load = cpasync.CopyBulkTensorTileG2SOp()
        k_atom, k_tma = cpasync.make_tiled_tma_atom(load, k, tile, (BLOCK, BLOCK))
        v_atom, v_tma = cpasync.make_tiled_tma_atom(load, v, tile, (BLOCK, BLOCK))

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * Q_STAGES]
            kv_barriers: cute.struct.MemRange[cutlass.Int64, 2 * KV_STAGES]
            following: cute.struct.MemRange[Int32, 4]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(kv_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(kv_layout)], 1024]

        self.storage = Storage
        self.kernel(
            device.row_box_atom(q, self.group),
            k_atom,
            k_tma,
            v_atom,
            v_tma,
            items,
            bucket_items,
            entries,
            partial,
            partial_lse,
            first_row,
            scale * Float32(LOG2E),
            mma_qk,
            mma_pv,
            q_layout,
            kv_layout,
        ).launch(grid=[grid, 1, 1], block=[128 + CONSUMERS, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        k_atom: cute.CopyAtom,
        k: cute.Tensor,
        v_atom: cute.CopyAtom,
        v: cute.Tensor,
        items: cute.Tensor,
        bucket_items: cute.Tensor,
        entries: cute.Tensor,
        partial: cute.Tensor,
        partial_lse: cute.Tensor,
        first_row: Int32,
        scale: Float32,  # of base-2 exponents
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        kv_layout: cute.ComposedLayout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.storage)
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        s_v = storage.v.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        if const_expr(self.group < self.padded):
            # Rows between the groups are never loaded: they must not hold NaN.
            device.fill_zero(storage.q.data_ptr().toint(), cute.cosize(q_layout) * 2, 128 + CONSUMERS)
        q_bytes = self.tile_queries * self.group * ROW_BYTES
        q_pipe = device.tma_pipeline(storage.q_barriers, Q_STAGES, q_bytes)
        # Full when K and V are there, and which item follows.
        kv_pipe = device.tma_pipeline(storage.kv_barriers, KV_STAGES, 2 * BLOCK * ROW_BYTES, producers=2)
        following = cute.make_tensor(storage.following.data_ptr(), cute.make_layout(KV_STAGES))
        n_items = bucket_items[bucket_items.shape[0] - 1]
        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                self.produce(
                    q_atom, k_atom, k, s_k, v_atom, v, s_v, storage.q.data_ptr().toint(), q_pipe, kv_pipe,
                    following, items, entries, first_row, n_items,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(240)
            self.consume(
                s_q, s_k, s_v, mma_qk, mma_pv, q_pipe, kv_pipe, following, items, entries, n_items,
                partial, partial_lse, scale,
            )  # fmt: skip

    @cute.jit
    def produce(
        self, q_atom, k_atom, k, s_k, v_atom, v, s_v, q_address, q_pipe, kv_pipe, following, items, entries,
        first_row, n_items,
    ):  # fmt: skip
        group, tile_queries = self.group, self.tile_queries
        lane = cute.arch.lane_idx()
        descriptor = copy_utils.get_tma_desc_addr(q_atom)
        q_state, kv_state = device.producer_state(Q_STAGES), device.producer_state(KV_STAGES)
        position = cute.arch.block_idx()[0]
        while position < n_items:
            ticket = device.take_ticket(items, lane)  # of the next item; it arrives while this one is loaded
            start, count, block, head_local = [items[position, i] for i in range(4)]
            head = head_local >> 16
            kv_head = head // (self.proxy_heads // self.kv_heads)
            g_k = cute.local_tile(k[None, None, kv_head], (BLOCK, BLOCK), (None, 0))
            g_v = cute.local_tile(v[None, None, kv_head], (BLOCK, BLOCK), (None, 0))
            load_k, _, _ = copy_utils.tma_get_copy_fn(k_atom, 0, cute.make_layout(1), g_k, s_k)
            load_v, _, _ = copy_utils.tma_get_copy_fn(v_atom, 0, cute.make_layout(1), g_v, s_v)
            kv_pipe.producer_acquire(kv_state)
            barrier = kv_pipe.producer_get_barrier(kv_state)
            load_k(block, kv_state.index, tma_bar_ptr=barrier)
            load_v(block, kv_state.index, tma_bar_ptr=barrier)
            next_position = cute.arch.grid_dim()[0] + cute.arch.shuffle_sync(ticket, 0)
            if lane == 0:
                following[kv_state.index] = next_position
                cute.arch.mbarrier_arrive(barrier)
            kv_state.advance()
            # A lane loads a query. Past the list's end it loads the last one again, so that every tile brings
            # the same number of bytes. The next tile's entries are read before the wait.
            entry = entries[start + cutlass.min(lane % tile_queries, count - 1)]
            for tile in cutlass.range((count + tile_queries - 1) // tile_queries, unroll=1):
                next_entry = entries[
                    start + cutlass.min((tile + 1) * tile_queries + lane % tile_queries, count - 1)
                ]
                q_pipe.producer_acquire(q_state)
                barrier_address = q_pipe.producer_get_barrier(q_state).toint()
                row = (first_row + (entry & Int32(QUERY_MASK))) * self.heads + head * group
                target = q_address + q_state.index * (ROWS * ROW_BYTES) + lane * (self.padded * 128)
                if lane < tile_queries:
                    device.box_load(descriptor, target, barrier_address, 0, row)
                    device.box_load(descriptor, target + ROWS * 128, barrier_address, 64, row)
                q_state.advance()
                entry = next_entry
            position = next_position

    @cute.jit
    def consume(
        self, s_q, s_k, s_v, mma_qk, mma_pv, q_pipe, kv_pipe, following, items, entries, n_items, partial,
        partial_lse, scale,
    ):  # fmt: skip
        tile_queries, padded = self.tile_queries, self.padded
        thread = cute.arch.thread_idx()[0] - 128
        lane = thread % 32
        warpgroup_index = cute.arch.make_warp_uniform(thread // 128)
        slices = cute.make_layout(2, stride=128)
        slice_qk = mma_qk.get_slice(slices(warpgroup_index))
        slice_pv = mma_pv.get_slice(slices(warpgroup_index))
        shape = (ROWS, BLOCK, BLOCK)
        acc_s, r_q, r_k = sm90_utils.partition_fragment_ABC(slice_qk, shape, s_q, s_k)
        acc_o, r_p, r_v = sm90_utils.partition_fragment_ABC(
            slice_pv, shape, None, layout_utils.transpose_view(s_v)
        )
        q_state, kv_state = device.consumer_state(Q_STAGES), device.consumer_state(KV_STAGES)
        row = (thread // 32) * 16 + lane // 4  # this thread's rows: row and row + 8
        position = cute.arch.block_idx()[0]
        while position < n_items:
            start, count, head_local = items[position, 0], items[position, 1], items[position, 3]
            head, n_local = head_local >> 16, head_local & 65535
            n_tiles = (count + tile_queries - 1) // tile_queries
            kv_pipe.consumer_wait(kv_state)
            i0, i1 = row // padded, (row + 8) // padded
            e0 = entries[start + cutlass.min(i0, count - 1)]
            e1 = entries[start + cutlass.min(i1, count - 1)]
            q_pipe.consumer_wait(q_state)
            sm90_utils.gemm(
                mma_qk,
                acc_s,
                r_q[None, None, None, q_state.index],
                r_k[None, None, None, kv_state.index],
                zero_init=True,
            )
            q_pipe.consumer_release(q_state)
            q_state.advance()
            if n_local > 0:
                mask_rows(acc_s, e0, e1, i0 < n_local, i1 < n_local, lane)
            row_max, row_sum = softmax_rows(acc_s, scale)
            round_to_operand(acc_s, r_p)
            for tile in cutlass.range(n_tiles, unroll=1):
                # Q K^T of the next tile and P V of this one are in flight together: the next softmax
                # hides under P V. Behind the last tile the product is of stale rows, and nobody reads it.
                j0, j1 = i0 + tile_queries, i1 + tile_queries
                f0 = entries[start + cutlass.min(j0, count - 1)]
                f1 = entries[start + cutlass.min(j1, count - 1)]
                more = tile + 1 < n_tiles
                if more:
                    q_pipe.consumer_wait(q_state)
                sm90_utils.gemm(
                    mma_qk,
                    acc_s,
                    r_q[None, None, None, q_state.index],
                    r_k[None, None, None, kv_state.index],
                    zero_init=True,
                    wg_wait=-1,
                )
                sm90_utils.gemm(
                    mma_pv, acc_o, r_p, r_v[None, None, None, kv_state.index], zero_init=True, wg_wait=-1
                )
                warpgroup.wait_group(1)
                if more:
                    q_pipe.consumer_release(q_state)
                    q_state.advance()
                if j0 < n_local:
                    mask_rows(acc_s, f0, f1, j0 < n_local, j1 < n_local, lane)
                next_max, next_sum = softmax_rows(acc_s, scale)
                warpgroup.wait_group(0)
                self.store(
                    acc_o, row_max, row_sum, e0, e1, i0, i1, count, head, row, lane, partial, partial_lse
                )
                round_to_operand(acc_s, r_p)
                for r in cutlass.range_constexpr(2):
                    row_max[r] = next_max[r]
                    row_sum[r] = next_sum[r]
                e0, e1, i0, i1 = f0, f1, j0, j1
            position = following[kv_state.index]
            cute.arch.sync_warp()  # one lane releases for all
            kv_pipe.consumer_release(kv_state)
            kv_state.advance()

    @cute.jit
    def store(self, acc_o, row_max, row_sum, e0, e1, i0, i1, count, head, row, lane, partial, partial_lse):
        group = self.group
        acc = layout_utils.reshape_acc_to_mn(acc_o)
        for r in cutlass.range_constexpr(2):
            entry = e0 if const_expr(r == 0) else e1
            index = i0 if const_expr(r == 0) else i1
            g = (row + 8 * r) % self.padded
            edge = device.edge_index(entry, head, self.proxy_heads, self.slots)
            inverse = cute.arch.rcp_approx(row_sum[r])
            packed = cute.make_rmem_tensor(16, Int32)
            for c in cutlass.range_constexpr(16):
                packed[c] = device.pack_bf16(acc[r, 2 * c] * inverse, acc[r, 2 * c + 1] * inverse)
            mine = index < count
            if const_expr(group < self.padded):
                mine = mine and g < group
            if mine:
                device.store_slot(partial, edge, group, g, lane % 4, packed, 0, 4)
                if lane % 4 == 0:
                    copy_utils.store(
                        device.global_pointer(partial_lse, Int64(edge) * group + g, Float32, 4),
                        row_max[r] + cute.math.log2(row_sum[r], fastmath=True),
                    )


@cute.jit
def mask_rows(
    acc_s: cute.Tensor, e0: Int32, e1: Int32, local0: cutlass.Boolean, local1: cutlass.Boolean, lane: Int32
):
    """-inf for the keys after a query in its own block, where it sits at place (query % 128)."""
    acc = layout_utils.reshape_acc_to_mn(acc_s)
    for r in cutlass.range_constexpr(2):
        entry = e0 if const_expr(r == 0) else e1
        local = local0 if const_expr(r == 0) else local1
        last = (entry & Int32(BLOCK - 1)) if local else Int32(BLOCK)
        last = last - (lane % 4) * 2
        for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            if Int32((c // 2) * 8 + c % 2) > last:
                acc[r, c] = -Float32.inf


@cute.jit
def softmax_rows(acc_s: cute.Tensor, scale: Float32):
    """Turns scores into exp2(scale * (s - max)), and returns scale * max and the sum of both rows.

    Four independent chains a row: one would wait for itself.
    """
    acc = layout_utils.reshape_acc_to_mn(acc_s)
    row_max = cute.make_rmem_tensor(2, Float32)
    row_sum = cute.make_rmem_tensor(2, Float32)
    columns = cute.size(acc, mode=[1])
    for r in cutlass.range_constexpr(2):
        tops = [acc[r, 0], acc[r, 1], acc[r, 2], acc[r, 3]]
        for c in cutlass.range_constexpr(4, columns, 4):
            for u in cutlass.range_constexpr(4):
                tops[u] = cute.arch.fmax(tops[u], acc[r, c + u])
        top = cute.arch.fmax(cute.arch.fmax(tops[0], tops[1]), cute.arch.fmax(tops[2], tops[3]))
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2)) * scale
        row_max[r] = top
        sums = [Float32(0.0) for _ in range(4)]
        for c in cutlass.range_constexpr(0, columns, 4):
            for u in cutlass.range_constexpr(4):
                p = cute.math.exp2(acc[r, c + u] * scale - top, fastmath=True)
                acc[r, c + u] = p
                sums[u] = sums[u] + p
        total = (sums[0] + sums[1]) + (sums[2] + sums[3])
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
        row_sum[r] = total + cute.arch.shuffle_sync_bfly(total, offset=2)
    return row_max, row_sum


@cute.jit
def round_to_operand(acc_s: cute.Tensor, r_p: cute.Tensor):
    """The accumulator, rounded to bf16, in the order in which a product takes it from registers."""
    values = layout_utils.reshape_acc_to_frgA(acc_s)
    packed = cute.recast_tensor(r_p, Int32)
    for i in cutlass.range_constexpr(cute.size(packed)):
        packed[i] = device.pack_bf16(values[2 * i], values[2 * i + 1])


@dataclass(unsafe_hash=True)
class Combine:
    """Adds up the slots of each (query, proxy head), in slot order.

    softmax: weighs them with their LSE, writes out and lse, sets kl to 0, and merges the proxy's LSE if
    with_proxy. Otherwise a plain sum times a factor (dq, dq_proxy), and, if times_grad_kl, times the KL's
    gradient, read from memory.
    """

    heads: int
    proxy_heads: int
    slots: int
    softmax: bool
    with_proxy: bool = False
    times_grad_kl: bool = False

    def __post_init__(self):
        self.group = self.heads // self.proxy_heads
        self.threads_per_query = 16 * self.group
        self.queries = max(1, 128 // self.threads_per_query)  # (query, proxy head) pairs of a CTA

    def arguments(self):
        return (
            jit.tensor("bf16", self.group * BLOCK),  # partials
            jit.tensor("f32"),  # their lse, base 2
            jit.tensor("f32"),  # partial lse of the proxy, base 2
            jit.tensor("i32"),  # block_indices: -1 marks a slot that holds nothing
            jit.tensor("f32"),  # one element: kl if softmax, or its gradient
            jit.tensor("bf16", BLOCK),  # out: (rows * H, D)
            jit.tensor("f32"),  # lse: (B, H, S)
            jit.tensor("f32"),  # lse_proxy: (B, Hp, S)
            Int32(0),  # first row of the chunk
            Int32(1),  # rows of the chunk
            Int32(1),  # S
            Float32(1.0),  # factor
        )

    @cute.jit
    def __call__(
        self,
        partial: cute.Tensor,
        partial_lse: cute.Tensor,
        partial_lse_proxy: cute.Tensor,
        block_indices: cute.Tensor,
        kl: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        lse_proxy: cute.Tensor,
        first_row: Int32,
        n_rows: Int32,
        seq_len: Int32,
        factor: Float32,
        stream,
    ):
        pairs = n_rows * self.proxy_heads
        self.kernel(
            partial, partial_lse, partial_lse_proxy, block_indices, kl, out, lse, lse_proxy,
            first_row, pairs, seq_len, factor,
        ).launch(
            grid=[(pairs + self.queries - 1) // self.queries, 1, 1],
            block=[self.threads_per_query * self.queries, 1, 1],
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        partial: cute.Tensor,
        partial_lse: cute.Tensor,
        partial_lse_proxy: cute.Tensor,
        block_indices: cute.Tensor,
        kl: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        lse_proxy: cute.Tensor,
        first_row: Int32,
        pairs: Int32,
        seq_len: Int32,
        factor: Float32,
    ):
        group, slots = self.group, self.slots
        thread = cute.arch.thread_idx()[0]
        pair = cute.arch.block_idx()[0] * self.queries + thread // self.threads_per_query
        thread = thread % self.threads_per_query
        j, g, t = thread // (4 * group), (thread // 4) % group, thread % 4
        if pair < pairs:
            row = first_row + pair // self.proxy_heads
            head = (pair % self.proxy_heads) * group + g
            source = Int64(pair) * slots
            index_align = 16 if const_expr(slots % 4 == 0) else 4
            chosen = cute.make_rmem_tensor(slots, Int32)
            device.load_vector(
                device.global_pointer(
                    block_indices, source + Int64(first_row) * (self.proxy_heads * slots), Int32, index_align
                ),
                chosen,
            )
            # An empty slot reads slot 0 with weight 0: what lies in its own place was never written.
            values = cute.make_rmem_tensor((8, slots), BFloat16)
            weights = cute.make_rmem_tensor(slots, Float32)
            for s in cutlass.range_constexpr(slots):
                at = source + (Int32(s) if chosen[s] >= 0 else Int32(0))
                device.load_vector(
                    device.global_pointer(partial, at * (group * BLOCK) + thread * 8, BFloat16),
                    values[None, s],
                )
                if const_expr(self.softmax):
                    one = cute.make_rmem_tensor(1, Float32)
                    device.load_vector(device.global_pointer(partial_lse, at * group + g, Float32, 4), one)
                    weights[s] = one[0] if chosen[s] >= 0 else -Float32.inf
                else:
                    weights[s] = Float32(1.0) if chosen[s] >= 0 else Float32(0.0)
            if const_expr(self.softmax):
                top, total = normalise(weights)
                factor = cute.arch.rcp_approx(total)
                if j == 0 and t == 0:
                    log_sum = (top + cute.math.log2(total, fastmath=True)) * Float32(LN2)
                    at = (Int64(row // seq_len) * self.heads + head) * seq_len + row % seq_len
                    copy_utils.store(device.global_pointer(lse, at, Float32, 4), log_sum)
                if pair == 0 and thread == 0:
                    kl[0] = Float32(0.0)  # its value, unless it is materialised: a launch less
            if const_expr(self.times_grad_kl):
                factor = factor * kl[0]
            total_values = cute.make_rmem_tensor(8, Float32)
            total_values.fill(0.0)
            for s in cutlass.range_constexpr(slots):
                total_values.store(total_values.load() + values[None, s].load().to(Float32) * weights[s])
            at = (Int64(row) * self.heads + head) * BLOCK
            for i in cutlass.range_constexpr(4):
                pointer = device.global_pointer(out, at + (8 * (4 * j + i) + 2 * t), BFloat16, 4)
                copy_utils.store(
                    cute.recast_ptr(pointer, dtype=Int32),
                    device.pack_bf16(total_values[2 * i] * factor, total_values[2 * i + 1] * factor),
                )
            if const_expr(self.with_proxy):
                if thread == 0:
                    for s in cutlass.range_constexpr(slots):
                        weights[s] = partial_lse_proxy[pair * slots + s] if chosen[s] >= 0 else -Float32.inf
                    top, total = normalise(weights)
                    proxy_head = pair % self.proxy_heads
                    at = (Int64(row // seq_len) * self.proxy_heads + proxy_head) * seq_len + row % seq_len
                    copy_utils.store(
                        device.global_pointer(lse_proxy, at, Float32, 4),
                        (top + cute.math.log2(total, fastmath=True)) * Float32(LN2),
                    )


@cute.jit
def normalise(weights: cute.Tensor):
    """Base-2 logarithms to weights relative to the largest; returns that and their sum."""
    top = weights[0]
    for s in cutlass.range_constexpr(1, cute.size(weights)):
        top = cute.arch.fmax(top, weights[s])
    total = Float32(0.0)
    for s in cutlass.range_constexpr(cute.size(weights)):
        weights[s] = cute.math.exp2(weights[s] - top, fastmath=True)
        total = total + weights[s]
    return top, total
