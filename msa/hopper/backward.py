"""Sparse attention backward, key blocks outside.

Tiles of 64 gathered rows (a query's heads together) against the 128 keys of an item's block. Scores stand
transposed, keys down and rows across: P and dS feed dV = P^T dO and dK = dS^T Q from registers, only dS goes
through shared memory, for dQ = dS K. dV and dK stay on chip until the item ends and leave as fp32 parts,
summed in item order by `SumKeys`; where a chunk has a single part of a block, it goes into the block's total
from here. dQ leaves in bf16 to the entry's slot, summed in slot order by `forward.Combine`. Each sum has one
order, and the same input gives the same bits.

With `teach` it also writes the teacher, the mean over a query's heads of P, for the proxy's kernel (eq. 9).
Its layout is groups of 8 entries, [256 threads][4]: thread (key row r, quad lane c) holds entries 2c and
2c + 1 at key r, then both at key r + 8, which is the accumulator of a tile of scores over 64 entries.
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
from msa.hopper.device import BLOCK, CONSUMERS, ITEM_FIELDS, LOG2E, QUERY_MASK

ROWS = 64
STAGES = 3  # of Q and of dO
ROW_BYTES = 2 * BLOCK
STAT_BYTES = 8 * ROWS  # lse and delta of a tile's rows
TEACHER_GROUP = 8  # entries
PART = 128 * BLOCK  # elements of an item's dK, and of its dV


@dataclass(unsafe_hash=True)
class Prepare:
    """What backward needs of each row: lse in base 2, and delta = sum(dO * O), laid out (query, Hp, 2, rows).

    Rows that only pad a group get lse = inf, so that their P is 0. Without `main` delta is not needed.
    """

    heads: int
    proxy_heads: int
    main: bool

    def __post_init__(self):
        self.group = self.heads // self.proxy_heads
        self.padded = device.padded_group(self.group)

    def arguments(self):
        return (
            jit.tensor("bf16", BLOCK),  # out: (rows * H, D)
            jit.tensor("bf16", BLOCK),  # grad_out
            jit.tensor("f32"),  # lse: (B, H, S)
            jit.tensor("f32"),  # stats
            Int32(0),  # first row of the chunk
            Int32(1),  # rows of the chunk
            Int32(1),  # S
        )

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        grad_out: cute.Tensor,
        lse: cute.Tensor,
        stats: cute.Tensor,
        first_row: Int32,
        n_rows: Int32,
        seq_len: Int32,
        stream,
    ):
        pairs = n_rows * self.heads
        self.kernel(out, grad_out, lse, stats, first_row, pairs, seq_len).launch(
            grid=[(pairs + 15) // 16, 1, 1], block=[256, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        grad_out: cute.Tensor,
        lse: cute.Tensor,
        stats: cute.Tensor,
        first_row: Int32,
        pairs: Int32,
        seq_len: Int32,
    ):
        group, padded = self.group, self.padded
        thread = cute.arch.thread_idx()[0]
        # 16 threads a row of 128. The last CTA's spare rows do the last one again: shuffles need all lanes.
        pair = cutlass.min(cute.arch.block_idx()[0] * 16 + thread // 16, pairs - 1)
        piece = thread % 16
        row, head = first_row + pair // self.heads, pair % self.heads
        delta = Float32(0.0)
        if const_expr(self.main):
            source = (Int64(row) * self.heads + head) * BLOCK + piece * 8
            a, b = cute.make_rmem_tensor(8, BFloat16), cute.make_rmem_tensor(8, BFloat16)
            device.load_vector(device.global_pointer(out, source, BFloat16), a)
            device.load_vector(device.global_pointer(grad_out, source, BFloat16), b)
            for i in cutlass.range_constexpr(8):
                delta = delta + a[i].to(Float32) * b[i].to(Float32)
            for step in cutlass.range_constexpr(4):
                delta = delta + cute.arch.shuffle_sync_bfly(delta, offset=1 << step)
        g = head % group
        base = Int64((pair // self.heads) * self.proxy_heads + head // group) * (2 * padded)
        if piece == 0:
            at = (Int64(row // seq_len) * self.heads + head) * seq_len + row % seq_len
            log_sum = cute.make_rmem_tensor(1, Float32)
            device.load_vector(device.global_pointer(lse, at, Float32, 4), log_sum)
            copy_utils.store(device.global_pointer(stats, base + g, Float32, 4), log_sum[0] * Float32(LOG2E))
            copy_utils.store(device.global_pointer(stats, base + (padded + g), Float32, 4), delta)
            if const_expr(group < padded):
                if g == 0:
                    for pad in cutlass.range_constexpr(group, padded):
                        copy_utils.store(device.global_pointer(stats, base + pad, Float32, 4), Float32.inf)
                        copy_utils.store(
                            device.global_pointer(stats, base + (padded + pad), Float32, 4), Float32(0.0)
                        )


@dataclass(unsafe_hash=True)
class Backward:
    """main: dq, dk, dv; teach: the teacher. At least one of them."""

    heads: int
    kv_heads: int
    proxy_heads: int
    slots: int
    main: bool
    teach: bool

    def __post_init__(self):
        self.group = self.heads // self.proxy_heads
        self.padded = device.padded_group(self.group)
        self.tile_queries = ROWS // self.padded
        # A total has one writer a chunk where its block has one item: not with several proxy heads to one.
        self.totals = self.proxy_heads == self.kv_heads

    def arguments(self):
        return (
            jit.tensor("bf16", BLOCK),  # q: (rows * H, D)
            jit.tensor("bf16", self.kv_heads, BLOCK),  # k: (keys, Hkv, D)
            jit.tensor("bf16", self.kv_heads, BLOCK),  # v
            jit.tensor("bf16", BLOCK),  # grad_out: (rows * H, D)
            jit.tensor("f32"),  # stats, from Prepare
            jit.tensor("i32", ITEM_FIELDS),  # items
            jit.tensor("i32"),  # bucket_items
            jit.tensor("i32"),  # entries
            jit.tensor("bf16", self.group * BLOCK),  # dq partials, as the forward's
            jit.tensor("f32", 2 * PART),  # dk and dv parts, by item
            jit.tensor("f32", 2 * PART),  # total of dk and dv, of SumKeys
            jit.tensor("bf16", TEACHER_GROUP * BLOCK),  # teacher
            Int32(0),  # first row of the chunk
            Int32(0),  # first key block of the chunk
            Int32(1),  # key blocks of the chunk
            Int32(1),  # 1 in the first chunk of a sequence
            Int32(1),  # 1 in the last
            Float32(1.0),  # scale
            Int32(1),  # multiprocessors
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        grad_out: cute.Tensor,
        stats: cute.Tensor,
        items: cute.Tensor,
        bucket_items: cute.Tensor,
        entries: cute.Tensor,
        partial: cute.Tensor,
        parts: cute.Tensor,
        total: cute.Tensor,
        teacher: cute.Tensor,
        first_row: Int32,
        first_block: Int32,
        n_blocks: Int32,
        is_first: Int32,
        is_last: Int32,
        scale: Float32,
        grid: Int32,
        stream,
    ):
        k, v = [layout_utils.select(x, [0, 2, 1]) for x in (k, v)]  # (keys, D, Hkv)
        mma_s = sm90_utils.make_tiled_mma(BFloat16, "K", "K", ROWS, atom_layout_mnk=(2, 1, 1))
        mma_kv = sm90_utils.make_tiled_mma(BFloat16, "K", "MN", BLOCK, source="RS", atom_layout_mnk=(2, 1, 1))
        mma_dq = sm90_utils.make_tiled_mma(BFloat16, "K", "MN", 64, atom_layout_mnk=(1, 2, 1))
        q_layout = device.rows_layout(ROWS, STAGES)
        kv_layout = sm90_utils.make_smem_layout(BFloat16, LayoutEnum.ROW_MAJOR, (BLOCK, BLOCK), 1)
        ds_layout = sm90_utils.make_smem_layout(
            BFloat16, LayoutEnum.ROW_MAJOR, (ROWS, BLOCK), 2, major_mode_size=64
        )
        tile = cute.select(kv_layout, mode=[0, 1])
        load = cpasync.CopyBulkTensorTileG2SOp()
        k_atom, k_tma = cpasync.make_tiled_tma_atom(load, k, tile, (BLOCK, BLOCK))
        v_atom, v_tma = cpasync.make_tiled_tma_atom(load, v, tile, (BLOCK, BLOCK))

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            do_barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            kv_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            following: cute.struct.MemRange[Int32, 4]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, STAGES * STAT_BYTES // 4], 128]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            do: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(kv_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(kv_layout)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(ds_layout)], 1024]

        self.storage = Storage
        self.kernel(
            device.row_box_atom(q, self.group), device.row_box_atom(grad_out, self.group),
            k_atom, k_tma, v_atom, v_tma, stats, items, bucket_items, entries, partial, parts, total, teacher,
            first_row, first_block, n_blocks, is_first, is_last, scale * Float32(LOG2E), mma_s, mma_kv,
            mma_dq, q_layout, kv_layout, ds_layout,
        ).launch(
            grid=[grid, 1, 1], block=[128 + CONSUMERS, 1, 1], stream=stream, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        do_atom: cute.CopyAtom,
        k_atom: cute.CopyAtom,
        k: cute.Tensor,
        v_atom: cute.CopyAtom,
        v: cute.Tensor,
        stats: cute.Tensor,
        items: cute.Tensor,
        bucket_items: cute.Tensor,
        entries: cute.Tensor,
        partial: cute.Tensor,
        parts: cute.Tensor,
        total: cute.Tensor,
        teacher: cute.Tensor,
        first_row: Int32,
        first_block: Int32,
        n_blocks: Int32,
        is_first: Int32,
        is_last: Int32,
        scale: Float32,
        mma_s: cute.TiledMma,
        mma_kv: cute.TiledMma,
        mma_dq: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        kv_layout: cute.ComposedLayout,
        ds_layout: cute.ComposedLayout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.storage)
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_do = storage.do.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        s_v = storage.v.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        s_ds = storage.ds.get_tensor(ds_layout.outer, swizzle=ds_layout.inner)
        q_address, do_address = storage.q.data_ptr().toint(), storage.do.data_ptr().toint()
        stat_address = storage.stats.data_ptr().toint()
        if const_expr(self.group < self.padded):
            # Rows between the groups are never loaded: they must not hold NaN.
            device.fill_zero(q_address, cute.cosize(q_layout) * 2, 128 + CONSUMERS)
            device.fill_zero(do_address, cute.cosize(q_layout) * 2, 128 + CONSUMERS)
        row_bytes = self.tile_queries * self.group * ROW_BYTES
        q_pipe = device.tma_pipeline(storage.q_barriers, STAGES, row_bytes + STAT_BYTES)
        do_pipe = device.tma_pipeline(storage.do_barriers, STAGES, row_bytes)
        # Full when K and V are there, and which item follows.
        kv_pipe = device.tma_pipeline(storage.kv_barriers, 1, 2 * BLOCK * ROW_BYTES, producers=2)
        following = cute.make_tensor(storage.following.data_ptr(), cute.make_layout(1))
        n_items = bucket_items[bucket_items.shape[0] - 1]
        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                self.produce(
                    q_atom, do_atom, k_atom, k, s_k, v_atom, v, s_v, q_address, do_address, stat_address,
                    q_pipe, do_pipe, kv_pipe, following, stats, items, entries, first_row, n_items,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(240)
            self.consume(
                s_q, s_do, s_k, s_v, s_ds, stat_address, mma_s, mma_kv, mma_dq, q_pipe, do_pipe, kv_pipe,
                following, items, bucket_items, entries, n_items, partial, parts, total, teacher, first_block,
                n_blocks, is_first, is_last, scale,
            )  # fmt: skip

    @cute.jit
    def produce(
        self, q_atom, do_atom, k_atom, k, s_k, v_atom, v, s_v, q_address, do_address, stat_address,
        q_pipe, do_pipe, kv_pipe, following, stats, items, entries, first_row, n_items,
    ):  # fmt: skip
        tile_queries = self.tile_queries
        stat_bytes = 8 * self.padded  # of a query
        lane = cute.arch.lane_idx()
        q_descriptor = copy_utils.get_tma_desc_addr(q_atom)
        do_descriptor = copy_utils.get_tma_desc_addr(do_atom)
        q_state, do_state = device.producer_state(STAGES), device.producer_state(STAGES)
        kv_state = device.producer_state(1)
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
            entry = entries[start + cutlass.min(lane % tile_queries, count - 1)]
            for tile in cutlass.range((count + tile_queries - 1) // tile_queries, unroll=1):
                next_entry = entries[
                    start + cutlass.min((tile + 1) * tile_queries + lane % tile_queries, count - 1)
                ]
                query = entry & Int32(QUERY_MASK)
                row = (first_row + query) * self.heads + head * self.group
                q_pipe.producer_acquire(q_state)
                q_barrier = q_pipe.producer_get_barrier(q_state).toint()
                if lane < tile_queries:
                    self.load_rows(q_descriptor, q_address, q_state.index, lane, q_barrier, row)
                    source = device.global_pointer(
                        stats, Int64(query * self.proxy_heads + head) * (2 * self.padded), Float32
                    )
                    target = stat_address + q_state.index * STAT_BYTES + lane * stat_bytes
                    device.bulk_load(target, source, stat_bytes, q_barrier)
                if const_expr(self.main):
                    do_pipe.producer_acquire(do_state)
                    do_barrier = do_pipe.producer_get_barrier(do_state).toint()
                    if lane < tile_queries:
                        self.load_rows(do_descriptor, do_address, do_state.index, lane, do_barrier, row)
                    do_state.advance()
                q_state.advance()
                entry = next_entry
            position = next_position

    @cute.jit
    def load_rows(self, descriptor, address, stage, lane, barrier, row):
        target = address + stage * (ROWS * ROW_BYTES) + lane * (self.padded * 128)
        device.box_load(descriptor, target, barrier, 0, row)
        device.box_load(descriptor, target + ROWS * 128, barrier, 64, row)

    @cute.jit
    def consume(
        self, s_q, s_do, s_k, s_v, s_ds, stat_address, mma_s, mma_kv, mma_dq, q_pipe, do_pipe, kv_pipe,
        following, items, bucket_items, entries, n_items, partial, parts, total, teacher, first_block,
        n_blocks, is_first, is_last, scale,
    ):  # fmt: skip
        tile_queries, padded = self.tile_queries, self.padded
        thread = cute.arch.thread_idx()[0] - 128
        lane = thread % 32
        warpgroup_index = cute.arch.make_warp_uniform(thread // 128)
        slices = cute.make_layout(2, stride=128)
        slice_s = mma_s.get_slice(slices(warpgroup_index))
        slice_kv = mma_kv.get_slice(slices(warpgroup_index))
        slice_dq = mma_dq.get_slice(slices(warpgroup_index))
        s_q_t, s_do_t, s_k_t, s_ds_t = [layout_utils.transpose_view(x) for x in (s_q, s_do, s_k, s_ds)]
        fragments = sm90_utils.partition_fragment_ABC
        acc_s, r_k, r_q = fragments(slice_s, (BLOCK, ROWS, BLOCK), s_k, s_q)
        acc_dp, r_v, r_do = fragments(slice_s, (BLOCK, ROWS, BLOCK), s_v, s_do)
        acc_dv, r_p, r_do_t = fragments(slice_kv, (BLOCK, BLOCK, ROWS), None, s_do_t)
        acc_dk, r_ds, r_q_t = fragments(slice_kv, (BLOCK, BLOCK, ROWS), None, s_q_t)
        acc_dq, r_ds_s, r_k_t = fragments(slice_dq, (ROWS, BLOCK, BLOCK), s_ds, s_k_t)
        store_ds, _, _ = copy_utils.get_smem_store_C(
            mma_s, s_ds_t, thread, transpose=True, position_independent=True, major_mode_size=64
        )
        q_state, do_state = device.consumer_state(STAGES), device.consumer_state(STAGES)
        kv_state = device.consumer_state(1)
        row = (
            (thread % 128) // 32
        ) * 16 + lane // 4  # of dQ; its key in S^T is 64 further in the second warpgroup
        key = warpgroup_index * 64 + row
        stat_thread = self.stat_offset(lane)
        buffer = Int32(0)  # of dS: the other one may still be read
        position = cute.arch.block_idx()[0]
        while position < n_items:
            start, count, block, head_local, item = [items[position, i] for i in range(5)]
            head, n_local = head_local >> 16, head_local & 65535
            acc_dv.fill(0.0)
            acc_dk.fill(0.0)
            kv_pipe.consumer_wait(kv_state)
            for tile in cutlass.range((count + tile_queries - 1) // tile_queries, unroll=1):
                first = tile * tile_queries
                i0, i1 = first + row // padded, first + (row + 8) // padded
                e0 = entries[start + cutlass.min(i0, count - 1)]
                e1 = entries[start + cutlass.min(i1, count - 1)]
                stat = stat_address + q_state.index * STAT_BYTES + stat_thread
                q_pipe.consumer_wait(q_state)
                sm90_utils.gemm(
                    mma_s,
                    acc_s,
                    r_k[None, None, None, 0],
                    r_q[None, None, None, q_state.index],
                    zero_init=True,
                    wg_wait=-1 if self.main else 0,
                )
                if const_expr(self.main):
                    do_pipe.consumer_wait(do_state)
                    sm90_utils.gemm(
                        mma_s,
                        acc_dp,
                        r_v[None, None, None, 0],
                        r_do[None, None, None, do_state.index],
                        zero_init=True,
                        wg_wait=1,
                    )
                if first < n_local or first + tile_queries > count:
                    self.mask(acc_s, entries, start, first, count, n_local, key, lane)
                self.exponentiate(acc_s, r_p, stat, scale)
                if const_expr(self.teach):
                    self.store_teacher(r_p, start + first, thread, teacher)
                if const_expr(self.main):
                    warpgroup.wait_group(0)
                    self.score_gradient(acc_s, acc_dp, r_ds, stat)
                    store_ds(r_ds, dst_idx=buffer)
                    sm90_utils.gemm(
                        mma_kv,
                        acc_dv,
                        r_p,
                        r_do_t[None, None, None, do_state.index],
                        zero_init=False,
                        wg_wait=-1,
                    )
                    cute.arch.fence_view_async_shared()
                    cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
                    sm90_utils.gemm(
                        mma_dq,
                        acc_dq,
                        r_ds_s[None, None, None, buffer],
                        r_k_t[None, None, None, 0],
                        zero_init=True,
                        wg_wait=1,
                    )
                    do_pipe.consumer_release(do_state)
                    do_state.advance()
                    sm90_utils.gemm(
                        mma_kv,
                        acc_dk,
                        r_ds,
                        r_q_t[None, None, None, q_state.index],
                        zero_init=False,
                        wg_wait=1,
                    )
                    self.store_dq(acc_dq, e0, e1, i0, i1, count, head, row, warpgroup_index, lane, partial)
                    warpgroup.wait_group(0)
                    buffer = buffer ^ 1
                q_pipe.consumer_release(q_state)
                q_state.advance()
            position = following[0]
            cute.arch.sync_warp()  # one lane releases for all
            kv_pipe.consumer_release(kv_state)
            kv_state.advance()
            if const_expr(self.main):
                alone = False
                if const_expr(self.totals):
                    bucket = head * n_blocks + (block - first_block)
                    alone = is_last == 0 and bucket_items[bucket + 1] - bucket_items[bucket] == 1
                if alone:
                    # The block's only part of this chunk goes to its total, without a way through SumKeys.
                    at = Int64((block - first_block) * self.kv_heads + head) * (2 * PART)
                    if is_first == 1:
                        store_part(acc_dk, total, at, warpgroup_index, thread)
                        store_part(acc_dv, total, at + PART, warpgroup_index, thread)
                    else:
                        add_part(acc_dk, total, at, warpgroup_index, thread)
                        add_part(acc_dv, total, at + PART, warpgroup_index, thread)
                else:
                    store_part(acc_dk, parts, Int64(item) * (2 * PART), warpgroup_index, thread)
                    store_part(acc_dv, parts, Int64(item) * (2 * PART) + PART, warpgroup_index, thread)

    def stat_offset(self, lane):
        """Bytes from a tile's stats to the lse of columns 2 * (lane % 4) + {0, 1}; its deltas follow."""
        if self.padded >= 8:
            return (lane % 4) * 8
        return ((lane % 4) // 2) * (8 * self.padded) + (lane % 2) * 8

    def stat_step(self, n):
        """Bytes from the stats of column c to those of column 8 * n + c."""
        query, head = (8 * n) // self.padded, (8 * n) % self.padded
        return query * 8 * self.padded + head * 4

    @cute.jit
    def mask(self, acc_s, entries, start, first, count, n_local, key, lane):
        """-inf for the keys after a query in its own block, and for rows past the list's end."""
        for n in cutlass.range_constexpr(8):
            index = first + (8 * n + 2 * (lane % 4)) // self.padded
            entry = entries[start + cutlass.min(index, count - 1)]
            last = (entry & Int32(BLOCK - 1)) if index < n_local else Int32(BLOCK - 1)
            if index >= count:
                last = Int32(-1)
            for r in cutlass.range_constexpr(2):
                if key + 8 * r > last:
                    acc_s[4 * n + 2 * r] = -Float32.inf
                    acc_s[4 * n + 2 * r + 1] = -Float32.inf

    @cute.jit
    def exponentiate(self, acc_s, r_p, stat, scale):
        """P in place of the scores, and rounded to bf16 for the product with dO."""
        packed = cute.recast_tensor(r_p, Int32)
        lse = cute.make_rmem_tensor(2, Float32)
        for n in cutlass.range_constexpr(8):
            device.load_vector(device.shared_pointer(stat + self.stat_step(n), Float32, 8), lse)
            for r in cutlass.range_constexpr(2):
                j = 4 * n + 2 * r
                p0 = cute.math.exp2(acc_s[j] * scale - lse[0], fastmath=True)
                p1 = cute.math.exp2(acc_s[j + 1] * scale - lse[1], fastmath=True)
                packed[j // 2] = device.pack_bf16(p0, p1)
                acc_s[j], acc_s[j + 1] = p0, p1

    @cute.jit
    def score_gradient(self, acc_s, acc_dp, r_ds, stat):
        """dS = P * (dP - delta), in bf16."""
        packed = cute.recast_tensor(r_ds, Int32)
        delta = cute.make_rmem_tensor(2, Float32)
        for n in cutlass.range_constexpr(8):
            device.load_vector(
                device.shared_pointer(stat + (self.stat_step(n) + 4 * self.padded), Float32, 8), delta
            )
            for r in cutlass.range_constexpr(2):
                j = 4 * n + 2 * r
                packed[j // 2] = device.pack_bf16(
                    acc_s[j] * (acc_dp[j] - delta[0]), acc_s[j + 1] * (acc_dp[j + 1] - delta[1])
                )

    @cute.jit
    def store_teacher(self, r_p, first, thread, teacher):
        """Sums P over each query's heads, spread over a quad, so that a lane ends with its two entries."""
        c = thread % 4
        high, odd = c >= 2, c % 2 == 1
        packed = cute.recast_tensor(r_p, Int32)
        pairs = cute.make_rmem_tensor(16, Float32)  # [2 * n + r], n the columns' group of 8
        for i in cutlass.range_constexpr(16):
            pairs[i] = device.low_bf16(packed[i]) + device.high_bf16(packed[i])
        mean = Float32(1.0 / self.group)
        target = Int64(first // TEACHER_GROUP) * (TEACHER_GROUP * BLOCK) + (thread - c) * 4
        if const_expr(self.padded == 8):
            # n is the query. Two halvings: first lanes 2, 3 take queries 4..7, then odd lanes the later two.
            half = halve(pairs, high, 2)
            mine = halve(half, odd, 1)
            store_entries(teacher, target + c * 4, mine, mean)
        elif const_expr(self.padded == 4):
            # n holds queries 2n (lanes 0, 1) and 2n + 1 (lanes 2, 3), and the tile is two groups of 8.
            sums = cute.make_rmem_tensor(8, Float32)  # [4 * group + 2 * (n % 4 // 2) + r], n % 2 == c % 2
            for i in cutlass.range_constexpr(8):
                even, uneven = pairs[4 * (i // 2) + i % 2], pairs[4 * (i // 2) + 2 + i % 2]
                kept, sent = (uneven if odd else even), (even if odd else uneven)
                sums[i] = kept + cute.arch.shuffle_sync_bfly(sent, offset=1)
            for group in cutlass.range_constexpr(2):
                mine = cute.make_rmem_tensor(4, Float32)  # [2 * query + r]
                for r in cutlass.range_constexpr(2):
                    a, b = sums[4 * group + r], sums[4 * group + 2 + r]
                    kept, sent = (b if high else a), (a if high else b)
                    other = cute.arch.shuffle_sync_bfly(sent, offset=2)
                    mine[r] = other if high else kept
                    mine[2 + r] = kept if high else other
                # Lane c holds n % 4 == c % 2 + 2 * (c // 2) == c: entries 2c and 2c + 1.
                store_entries(teacher, target + (group * (TEACHER_GROUP * BLOCK) + c * 4), mine, mean)
        else:
            # A query is two n, and the tile is half a group of 8.
            sums = cute.make_rmem_tensor(8, Float32)  # [2 * query + r]
            for i in cutlass.range_constexpr(8):
                sums[i] = pairs[4 * (i // 2) + i % 2] + pairs[4 * (i // 2) + 2 + i % 2]
            mine = halve(sums, high, 2)
            for i in cutlass.range_constexpr(4):
                mine[i] = mine[i] + cute.arch.shuffle_sync_bfly(mine[i], offset=1)
            if c % 2 == 0:
                lane = (first % TEACHER_GROUP) // 2 + c // 2
                store_entries(teacher, target + lane * 4, mine, mean)

    @cute.jit
    def store_dq(self, acc_dq, e0, e1, i0, i1, count, head, row, warpgroup_index, lane, partial):
        group = self.group
        for r in cutlass.range_constexpr(2):
            entry = e0 if const_expr(r == 0) else e1
            index = i0 if const_expr(r == 0) else i1
            g = (row + 8 * r) % self.padded
            packed = cute.make_rmem_tensor(8, Int32)
            for c in cutlass.range_constexpr(8):
                packed[c] = device.pack_bf16(acc_dq[4 * c + 2 * r], acc_dq[4 * c + 2 * r + 1])
            mine = index < count
            if const_expr(group < self.padded):
                mine = mine and g < group
            if mine:
                edge = device.edge_index(entry, head, self.proxy_heads, self.slots)
                device.store_slot(partial, edge, group, g, lane % 4, packed, 2 * warpgroup_index, 2)


@cute.jit
def halve(values: cute.Tensor, upper: cutlass.Boolean, offset: cutlass.Constexpr[int]):
    """Lanes `offset` apart add up what they hold and keep a half each, the upper lane the upper half."""
    n = cute.size(values) // 2
    kept = cute.make_rmem_tensor(n, Float32)
    for i in cutlass.range_constexpr(n):
        sent = values[i] if upper else values[i + n]
        own = values[i + n] if upper else values[i]
        kept[i] = own + cute.arch.shuffle_sync_bfly(sent, offset=offset)
    return kept


@cute.jit
def store_entries(teacher: cute.Tensor, offset: Int64, values: cute.Tensor, mean: Float32):
    """values [2 * entry + r], two entries and the keys r and r + 8, as bf16 [r][entry]."""
    pointer = cute.recast_ptr(device.global_pointer(teacher, offset, BFloat16, 8), dtype=Int32)
    copy_utils.store_v2(
        pointer,
        device.pack_bf16(values[0] * mean, values[2] * mean),
        device.pack_bf16(values[1] * mean, values[3] * mean),
        cop="cs",
    )


def part_pointer(parts: cute.Tensor, offset: Int64, warpgroup_index: Int32, thread: Int32):
    """Where a thread's values of a part begin."""
    return device.global_pointer(
        parts, offset + (warpgroup_index * (PART // 2) + (thread % 128) * 4), Float32
    )


@cute.jit
def store_part(acc: cute.Tensor, parts: cute.Tensor, offset: Int64, warpgroup_index: Int32, thread: Int32):
    """An item's (128 keys, 128) accumulator in register order: [warpgroup][16][128 threads][4] fp32."""
    pointer = part_pointer(parts, offset, warpgroup_index, thread)
    for i in cutlass.range_constexpr(16):
        copy_utils.store_v4(pointer + i * 512, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3])


@cute.jit
def add_part(acc: cute.Tensor, total: cute.Tensor, offset: Int64, warpgroup_index: Int32, thread: Int32):
    """`store_part`, added to what is there. Nobody else writes it: sums go by the order of chunks."""
    pointer = part_pointer(total, offset, warpgroup_index, thread)
    for i in cutlass.range_constexpr(16):
        device.add_vector(pointer + i * 512, [acc[4 * i + j] for j in range(4)])


@dataclass(unsafe_hash=True)
class SumKeys:
    """Adds up the parts of each key block in item order, and what earlier chunks left in `total`, to which
    Backward itself adds where a chunk has a single part.

    outputs: 2 for dk and dv, 1 for dk_proxy. The first output is multiplied by a factor, and, if
    times_grad_kl, by the KL's gradient, read from memory.
    """

    proxy_heads: int
    key_heads: int
    outputs: int
    times_grad_kl: bool = False

    def __post_init__(self):
        self.totals = self.outputs == 2 and self.proxy_heads == self.key_heads  # as Backward's

    def arguments(self):
        return (
            jit.tensor("f32", self.outputs * PART),  # parts, by item
            jit.tensor("i32"),  # bucket_items
            jit.tensor("f32", self.outputs * PART),  # total: (blocks of the chunk * key heads), as the parts
            jit.tensor("f32"),  # gradient of kl, one element
            jit.tensor("bf16", self.key_heads, BLOCK),  # first output: (keys, heads, D)
            jit.tensor("bf16", self.key_heads, BLOCK),  # second output
            Int32(0),  # first key block of the chunk
            Int32(1),  # key blocks of the chunk
            Float32(1.0),  # factor
            Int32(1),  # 1 in the first chunk of a sequence: total holds nothing yet
            Int32(1),  # 1 in the last: write the outputs, not total
        )

    @cute.jit
    def __call__(
        self,
        parts: cute.Tensor,
        bucket_items: cute.Tensor,
        total: cute.Tensor,
        grad_kl: cute.Tensor,
        out0: cute.Tensor,
        out1: cute.Tensor,
        first_block: Int32,
        n_blocks: Int32,
        factor: Float32,
        is_first: Int32,
        is_last: Int32,
        stream,
    ):
        self.kernel(
            parts, bucket_items, total, grad_kl, out0, out1, first_block, n_blocks, factor, is_first, is_last
        ).launch(grid=[n_blocks, 4 * self.outputs, self.key_heads], block=[256, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        parts: cute.Tensor,
        bucket_items: cute.Tensor,
        total: cute.Tensor,
        grad_kl: cute.Tensor,
        out0: cute.Tensor,
        out1: cute.Tensor,
        first_block: Int32,
        n_blocks: Int32,
        factor: Float32,
        is_first: Int32,
        is_last: Int32,
    ):
        block, quarter, head = cute.arch.block_idx()
        heads = self.proxy_heads // self.key_heads
        n_items = Int32(0)
        for h in cutlass.range_constexpr(heads):
            bucket = (head * heads + h) * n_blocks + block
            n_items += bucket_items[bucket + 1] - bucket_items[bucket]
        work = n_items + is_first + is_last > 0  # else total stays as it is: nothing of this chunk
        if const_expr(self.totals):
            work = work and (n_items != 1 or is_last == 1)  # else it holds the only part already
        if work:
            output, quarter = quarter // 4, quarter % 4
            thread = cute.arch.thread_idx()[0]
            offset = output * PART + (thread // 128) * (PART // 2) + quarter * 2048 + (thread % 128) * 4
            acc = cute.make_rmem_tensor(16, Float32)
            acc.fill(0.0)
            at_total = Int64(block * self.key_heads + head) * (self.outputs * PART) + offset
            if is_first == 0:
                load_quarter(total, at_total, acc)
            part = cute.make_rmem_tensor(16, Float32)
            for h in cutlass.range_constexpr(heads):
                bucket = (head * heads + h) * n_blocks + block
                item, end = bucket_items[bucket], bucket_items[bucket + 1]
                while item < end:
                    load_quarter(parts, Int64(item) * (self.outputs * PART) + offset, part)
                    acc.store(acc.load() + part.load())
                    item += 1
            if is_last == 0:
                for u in cutlass.range_constexpr(4):
                    copy_utils.store_v4(
                        device.global_pointer(total, at_total + u * 512, Float32),
                        acc[4 * u], acc[4 * u + 1], acc[4 * u + 2], acc[4 * u + 3],
                    )  # fmt: skip
            else:
                if const_expr(self.times_grad_kl):
                    factor = factor * grad_kl[0]
                if const_expr(self.outputs == 2):
                    factor = factor if output == 0 else Float32(1.0)
                lane = thread % 32
                key = (
                    (first_block + block) * BLOCK
                    + (thread // 128) * 64
                    + ((thread % 128) // 32) * 16
                    + lane // 4
                )
                column = quarter * 32 + 2 * (lane % 4)
                for u in cutlass.range_constexpr(4):
                    for r in cutlass.range_constexpr(2):
                        if key + 8 * r < out0.shape[0]:
                            at = (Int64(key + 8 * r) * self.key_heads + head) * BLOCK + (column + 8 * u)
                            value = device.pack_bf16(
                                acc[4 * u + 2 * r] * factor, acc[4 * u + 2 * r + 1] * factor
                            )
                            if const_expr(self.outputs == 2):
                                if output == 0:
                                    store_pair(out0, at, value)
                                else:
                                    store_pair(out1, at, value)
                            else:
                                store_pair(out0, at, value)


@cute.jit
def load_quarter(source: cute.Tensor, offset: Int64, values: cute.Tensor):
    for u in cutlass.range_constexpr(4):
        piece = cute.make_tensor(values.iterator + 4 * u, cute.make_layout(4))
        device.load_vector(device.global_pointer(source, offset + u * 512, Float32), piece)


@cute.jit
def store_pair(out: cute.Tensor, offset: Int64, value: Int32):
    pointer = device.global_pointer(out, offset, BFloat16, 4)
    copy_utils.store(cute.recast_ptr(pointer, dtype=Int32), value)
