"""The proxy's side of sparse attention: its LSE over the selected tokens, and the KL's gradient and value.

Eq. 9 and 10 of arXiv 2606.13392 over the same work items as the main branch. A proxy head's rows are single
rows of 256 bytes, too small for TMA boxes: the producer warps gather them with cp.async, into the same
swizzled tiles.
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
from msa.hopper.backward import PART, TEACHER_GROUP, store_part
from msa.hopper.device import BLOCK, CONSUMERS, ITEM_FIELDS, LN2, LOG2E, QUERY_MASK
from msa.hopper.forward import mask_rows, softmax_rows

STAGES = 3
K_STAGES = 2
ROW_BYTES = 2 * BLOCK
LSE_ROWS = 128
ROWS = 64
TEACHER_BYTES = ROWS * BLOCK * 2


def gather_pipeline(barriers, num_bytes):
    """A stage is full when 128 threads' cp.async have arrived, and `num_bytes` by bulk copies."""
    return device.tma_pipeline(barriers, STAGES, num_bytes, producers=129)


@cute.jit
def gather_rows(
    matrix: cute.Tensor,
    entry: Int32,
    rows: cutlass.Constexpr[int],
    address: Int32,
    first_row: Int32,
    heads: cutlass.Constexpr[int],
    head: Int32,
):
    """A producer warp's quarter of a tile: half a warp a row, 16 bytes a lane, swizzled as TMA would.

    `entry` is that of row (lane % (rows / 4)) of the quarter.
    """
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    half, piece = lane // 16, lane % 16
    for i in cutlass.range_constexpr(rows // 8):
        query = cute.arch.shuffle_sync(entry, half + 2 * i) & Int32(QUERY_MASK)
        row = warp * (rows // 4) + half + 2 * i
        source = (Int64(first_row + query) * heads + head) * BLOCK + piece * 8
        target = (piece // 8) * (rows * 128) + row * 128 + ((piece % 8) ^ (row % 8)) * 16
        device.async_load_16(address + target, device.global_pointer(matrix, source, BFloat16))


@dataclass(unsafe_hash=True)
class ProxyLse:
    """The logarithm, base 2, of each entry's sum of exponentiated proxy scores, to its slot."""

    proxy_heads: int
    slots: int

    def arguments(self):
        return (
            jit.tensor("bf16", BLOCK),  # q_proxy: (rows * Hp, D)
            jit.tensor("bf16", BLOCK),  # k_proxy: (keys, D)
            jit.tensor("i32", ITEM_FIELDS),  # items
            jit.tensor("i32"),  # bucket_items
            jit.tensor("i32"),  # entries
            jit.tensor("f32"),  # partial lse
            Int32(0),  # first row of the chunk
            Float32(1.0),  # scale
            Int32(1),  # multiprocessors
        )

    @cute.jit
    def __call__(
        self,
        q_proxy: cute.Tensor,
        k_proxy: cute.Tensor,
        items: cute.Tensor,
        bucket_items: cute.Tensor,
        entries: cute.Tensor,
        partial_lse: cute.Tensor,
        first_row: Int32,
        scale: Float32,
        grid: Int32,
        stream,
    ):
        mma = sm90_utils.make_tiled_mma(BFloat16, "K", "K", BLOCK, atom_layout_mnk=(2, 1, 1))
        q_layout = device.rows_layout(LSE_ROWS, STAGES)
        k_layout = sm90_utils.make_smem_layout(BFloat16, LayoutEnum.ROW_MAJOR, (BLOCK, BLOCK), K_STAGES)
        k_atom, k_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), k_proxy, cute.select(k_layout, mode=[0, 1]), (BLOCK, BLOCK)
        )

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * K_STAGES]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], 1024]

        self.storage = Storage
        self.kernel(
            q_proxy, k_atom, k_tma, items, bucket_items, entries, partial_lse, first_row,
            scale * Float32(LOG2E), mma, q_layout, k_layout,
        ).launch(
            grid=[grid, 1, 1], block=[128 + CONSUMERS, 1, 1], stream=stream, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q_proxy: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_proxy: cute.Tensor,
        items: cute.Tensor,
        bucket_items: cute.Tensor,
        entries: cute.Tensor,
        partial_lse: cute.Tensor,
        first_row: Int32,
        scale: Float32,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.storage)
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        q_pipe = gather_pipeline(storage.q_barriers, 0)
        k_pipe = device.tma_pipeline(storage.k_barriers, K_STAGES, BLOCK * ROW_BYTES)
        n_items = bucket_items[bucket_items.shape[0] - 1]
        if warp < 4:
            cute.arch.setmaxregister_decrease(40)
            self.produce(
                q_proxy, k_atom, k_proxy, s_k, storage.q.data_ptr().toint(), q_pipe, k_pipe, items, entries,
                first_row, n_items,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(232)
            self.consume(s_q, s_k, mma, q_pipe, k_pipe, items, entries, n_items, partial_lse, scale)

    @cute.jit
    def produce(
        self, q_proxy, k_atom, k_proxy, s_k, q_address, q_pipe, k_pipe, items, entries, first_row, n_items
    ):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        q_state, k_state = device.producer_state(STAGES), device.producer_state(K_STAGES)
        g_k = cute.local_tile(k_proxy, (BLOCK, BLOCK), (None, 0))
        load_k, _, _ = copy_utils.tma_get_copy_fn(k_atom, 0, cute.make_layout(1), g_k, s_k)
        position = cute.arch.block_idx()[0]
        while position < n_items:
            start, count, block, head_local = [items[position, i] for i in range(4)]
            head = head_local >> 16
            if warp == 0:
                k_pipe.producer_acquire(k_state)
                load_k(block, k_state.index, tma_bar_ptr=k_pipe.producer_get_barrier(k_state))
            k_state.advance()
            at = warp * (LSE_ROWS // 4) + lane
            entry = entries[start + cutlass.min(at, count - 1)]
            for tile in cutlass.range((count + LSE_ROWS - 1) // LSE_ROWS, unroll=1):
                following = entries[start + cutlass.min((tile + 1) * LSE_ROWS + at, count - 1)]
                barrier = q_pipe.producer_get_barrier(q_state)
                if warp == 0:
                    q_pipe.producer_acquire(q_state)
                else:
                    q_pipe.sync_object_empty.wait(q_state.index, q_state.phase)
                target = q_address + q_state.index * (LSE_ROWS * ROW_BYTES)
                gather_rows(q_proxy, entry, LSE_ROWS, target, first_row, self.proxy_heads, head)
                cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
                q_state.advance()
                entry = following
            position += cute.arch.grid_dim()[0]

    @cute.jit
    def consume(self, s_q, s_k, mma, q_pipe, k_pipe, items, entries, n_items, partial_lse, scale):
        thread = cute.arch.thread_idx()[0] - 128
        lane = thread % 32
        warpgroup_index = cute.arch.make_warp_uniform(thread // 128)
        mma_slice = mma.get_slice(cute.make_layout(2, stride=128)(warpgroup_index))
        acc, r_q, r_k = sm90_utils.partition_fragment_ABC(mma_slice, (LSE_ROWS, BLOCK, BLOCK), s_q, s_k)
        q_state, k_state = device.consumer_state(STAGES), device.consumer_state(K_STAGES)
        row = (thread // 32) * 16 + lane // 4
        position = cute.arch.block_idx()[0]
        while position < n_items:
            start, count, head_local = items[position, 0], items[position, 1], items[position, 3]
            head, n_local = head_local >> 16, head_local & 65535
            k_pipe.consumer_wait(k_state)
            for tile in cutlass.range((count + LSE_ROWS - 1) // LSE_ROWS, unroll=1):
                i0 = tile * LSE_ROWS + row
                i1 = i0 + 8
                e0 = entries[start + cutlass.min(i0, count - 1)]
                e1 = entries[start + cutlass.min(i1, count - 1)]
                q_pipe.consumer_wait(q_state)
                cute.arch.fence_view_async_shared()  # what cp.async wrote, to be read by the tensor cores
                sm90_utils.gemm(
                    mma,
                    acc,
                    r_q[None, None, None, q_state.index],
                    r_k[None, None, None, k_state.index],
                    zero_init=True,
                )
                q_pipe.consumer_release(q_state)
                q_state.advance()
                if tile * LSE_ROWS < n_local:
                    mask_rows(acc, e0, e1, i0 < n_local, i1 < n_local, lane)
                row_max, row_sum = softmax_rows(acc, scale)
                for r in cutlass.range_constexpr(2):
                    entry = e0 if const_expr(r == 0) else e1
                    index = i0 if const_expr(r == 0) else i1
                    if index < count and lane % 4 == 0:
                        edge = device.edge_index(entry, head, self.proxy_heads, self.slots)
                        copy_utils.store(
                            device.global_pointer(partial_lse, Int64(edge), Float32, 4),
                            row_max[r] + cute.math.log2(row_sum[r], fastmath=True),
                        )
            k_pipe.consumer_release(k_state)
            k_state.advance()
            position += cute.arch.grid_dim()[0]


@dataclass(unsafe_hash=True)
class ProxyBackward:
    """The KL of each item, and with `grads` the proxy's gradients without the KL's own factor.

    Shaped as the main backward: scores transposed, student - teacher to dk_proxy from registers, to dq_proxy
    through shared memory; dq_proxy leaves by slot, dk_proxy by item.
    """

    proxy_heads: int
    slots: int
    grads: bool

    def arguments(self):
        return (
            jit.tensor("bf16", BLOCK),  # q_proxy: (rows * Hp, D)
            jit.tensor("bf16", BLOCK),  # k_proxy: (keys, D)
            jit.tensor("f32"),  # lse_proxy: (B, Hp, S)
            jit.tensor("bf16", TEACHER_GROUP * BLOCK),  # teacher, as backward.Backward writes it
            jit.tensor("i32", ITEM_FIELDS),  # items
            jit.tensor("i32"),  # bucket_items
            jit.tensor("i32"),  # entries
            jit.tensor("bf16", BLOCK),  # dq_proxy partials
            jit.tensor("f32", PART),  # dk_proxy parts, by item
            jit.tensor("f32"),  # KL by item, nats
            Int32(0),  # first row of the chunk
            Int32(1),  # S
            Float32(1.0),  # scale
            Int32(1),  # multiprocessors
        )

    @cute.jit
    def __call__(
        self,
        q_proxy: cute.Tensor,
        k_proxy: cute.Tensor,
        lse_proxy: cute.Tensor,
        teacher: cute.Tensor,
        items: cute.Tensor,
        bucket_items: cute.Tensor,
        entries: cute.Tensor,
        partial: cute.Tensor,
        parts: cute.Tensor,
        kl: cute.Tensor,
        first_row: Int32,
        seq_len: Int32,
        scale: Float32,
        grid: Int32,
        stream,
    ):
        mma_s = sm90_utils.make_tiled_mma(BFloat16, "K", "K", ROWS, atom_layout_mnk=(2, 1, 1))
        mma_dk = sm90_utils.make_tiled_mma(BFloat16, "K", "MN", BLOCK, source="RS", atom_layout_mnk=(2, 1, 1))
        mma_dq = sm90_utils.make_tiled_mma(BFloat16, "K", "MN", 64, atom_layout_mnk=(1, 2, 1))
        q_layout = device.rows_layout(ROWS, STAGES)
        k_layout = sm90_utils.make_smem_layout(BFloat16, LayoutEnum.ROW_MAJOR, (BLOCK, BLOCK), K_STAGES)
        ds_layout = sm90_utils.make_smem_layout(
            BFloat16, LayoutEnum.ROW_MAJOR, (ROWS, BLOCK), 2, major_mode_size=64
        )
        k_atom, k_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), k_proxy, cute.select(k_layout, mode=[0, 1]), (BLOCK, BLOCK)
        )

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * K_STAGES]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, 4 * ROWS], 128]  # [warpgroup][2][rows]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, CONSUMERS // 32], 128]
            teacher: cute.struct.Align[cute.struct.MemRange[BFloat16, ROWS * BLOCK * STAGES], 128]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(ds_layout)], 1024]

        self.storage = Storage
        self.kernel(
            q_proxy, k_atom, k_tma, lse_proxy, teacher, items, bucket_items, entries, partial, parts, kl,
            first_row, seq_len, scale * Float32(LOG2E), mma_s, mma_dk, mma_dq, q_layout, k_layout, ds_layout,
        ).launch(
            grid=[grid, 1, 1], block=[128 + CONSUMERS, 1, 1], stream=stream, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q_proxy: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_proxy: cute.Tensor,
        lse_proxy: cute.Tensor,
        teacher: cute.Tensor,
        items: cute.Tensor,
        bucket_items: cute.Tensor,
        entries: cute.Tensor,
        partial: cute.Tensor,
        parts: cute.Tensor,
        kl: cute.Tensor,
        first_row: Int32,
        seq_len: Int32,
        scale: Float32,
        mma_s: cute.TiledMma,
        mma_dk: cute.TiledMma,
        mma_dq: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        ds_layout: cute.ComposedLayout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.storage)
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_ds = storage.ds.get_tensor(ds_layout.outer, swizzle=ds_layout.inner)
        teacher_address = storage.teacher.data_ptr().toint()
        warp_sums = cute.make_tensor(storage.sums.data_ptr(), cute.make_layout(CONSUMERS // 32))
        q_pipe = gather_pipeline(storage.q_barriers, TEACHER_BYTES)
        k_pipe = device.tma_pipeline(storage.k_barriers, K_STAGES, BLOCK * ROW_BYTES)
        n_items = bucket_items[bucket_items.shape[0] - 1]
        if warp < 4:
            cute.arch.setmaxregister_decrease(40)
            self.produce(
                q_proxy, k_atom, k_proxy, s_k, storage.q.data_ptr().toint(), teacher_address, q_pipe, k_pipe,
                teacher, items, entries, first_row, n_items,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(232)
            self.consume(
                s_q, s_k, s_ds, storage.lse.data_ptr().toint(), teacher_address, warp_sums, mma_s, mma_dk,
                mma_dq, q_pipe, k_pipe, items, entries, n_items, lse_proxy, partial, parts, kl, first_row,
                seq_len, scale,
            )  # fmt: skip

    @cute.jit
    def produce(
        self, q_proxy, k_atom, k_proxy, s_k, q_address, teacher_address, q_pipe, k_pipe, teacher, items,
        entries, first_row, n_items,
    ):  # fmt: skip
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        q_state, k_state = device.producer_state(STAGES), device.producer_state(K_STAGES)
        g_k = cute.local_tile(k_proxy, (BLOCK, BLOCK), (None, 0))
        load_k, _, _ = copy_utils.tma_get_copy_fn(k_atom, 0, cute.make_layout(1), g_k, s_k)
        position = cute.arch.block_idx()[0]
        while position < n_items:
            start, count, block, head_local = [items[position, i] for i in range(4)]
            head = head_local >> 16
            if warp == 0:
                k_pipe.producer_acquire(k_state)
                load_k(block, k_state.index, tma_bar_ptr=k_pipe.producer_get_barrier(k_state))
            k_state.advance()
            at = warp * (ROWS // 4) + lane % (ROWS // 4)
            entry = entries[start + cutlass.min(at, count - 1)]
            for tile in cutlass.range((count + ROWS - 1) // ROWS, unroll=1):
                following = entries[start + cutlass.min((tile + 1) * ROWS + at, count - 1)]
                barrier = q_pipe.producer_get_barrier(q_state)
                if warp == 0:
                    q_pipe.producer_acquire(q_state)
                    if lane == 0:
                        group = Int64((start + tile * ROWS) // TEACHER_GROUP)
                        source = device.global_pointer(teacher, group * (TEACHER_GROUP * BLOCK), BFloat16)
                        device.bulk_load(
                            teacher_address + q_state.index * TEACHER_BYTES,
                            source,
                            TEACHER_BYTES,
                            barrier.toint(),
                        )
                else:
                    q_pipe.sync_object_empty.wait(q_state.index, q_state.phase)
                target = q_address + q_state.index * (ROWS * ROW_BYTES)
                gather_rows(q_proxy, entry, ROWS, target, first_row, self.proxy_heads, head)
                cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
                q_state.advance()
                entry = following
            position += cute.arch.grid_dim()[0]

    @cute.jit
    def consume(
        self, s_q, s_k, s_ds, lse_address, teacher_address, warp_sums, mma_s, mma_dk, mma_dq, q_pipe, k_pipe,
        items, entries, n_items, lse_proxy, partial, parts, kl, first_row, seq_len, scale,
    ):  # fmt: skip
        thread = cute.arch.thread_idx()[0] - 128
        lane = thread % 32
        warpgroup_index = cute.arch.make_warp_uniform(thread // 128)
        slices = cute.make_layout(2, stride=128)
        s_q_t, s_k_t, s_ds_t = [layout_utils.transpose_view(x) for x in (s_q, s_k, s_ds)]
        fragments = sm90_utils.partition_fragment_ABC
        acc_s, r_k, r_q = fragments(mma_s.get_slice(slices(warpgroup_index)), (BLOCK, ROWS, BLOCK), s_k, s_q)
        acc_dk, r_ds, r_q_t = fragments(
            mma_dk.get_slice(slices(warpgroup_index)), (BLOCK, BLOCK, ROWS), None, s_q_t
        )
        acc_dq, r_ds_s, r_k_t = fragments(
            mma_dq.get_slice(slices(warpgroup_index)), (ROWS, BLOCK, BLOCK), s_ds, s_k_t
        )
        store_ds, _, _ = copy_utils.get_smem_store_C(
            mma_s, s_ds_t, thread, transpose=True, position_independent=True, major_mode_size=64
        )
        q_state, k_state = device.consumer_state(STAGES), device.consumer_state(K_STAGES)
        row = ((thread % 128) // 32) * 16 + lane // 4
        key = warpgroup_index * 64 + row
        # Each warpgroup keeps its own copy of a tile's student LSE: thread u reads entry u's, a tile ahead.
        u = thread % 64
        my_lse = lse_address + warpgroup_index * (8 * ROWS)
        my_teacher = teacher_address + thread * 8
        buffer = Int32(0)
        position = cute.arch.block_idx()[0]
        while position < n_items:
            start, count, _, head_local, item = [items[position, i] for i in range(5)]
            head, n_local = head_local >> 16, head_local & 65535
            acc_dk.fill(0.0)
            item_kl = Float32(0.0)
            entry = entries[start + cutlass.min(u, count - 1)]
            # lse_proxy is (B, Hp, S), and all of an item is of one sequence.
            sequence = (first_row + (entry & Int32(QUERY_MASK))) // seq_len
            lse_base = Int64(sequence * (self.proxy_heads - 1) + head) * seq_len + first_row
            lse = self.load_lse(lse_proxy, entry, lse_base)
            self.share_lse(lse, my_lse + buffer * (4 * ROWS), thread)
            ahead = entries[start + cutlass.min(ROWS + u, count - 1)]
            cute.arch.barrier(barrier_id=2 + warpgroup_index, number_of_threads=128)
            k_pipe.consumer_wait(k_state)
            for tile in cutlass.range((count + ROWS - 1) // ROWS, unroll=1):
                first = tile * ROWS
                # The next tile's, on its way under this one's product.
                lse = self.load_lse(lse_proxy, ahead, lse_base)
                ahead = entries[start + cutlass.min(first + 2 * ROWS + u, count - 1)]
                q_pipe.consumer_wait(q_state)
                cute.arch.fence_view_async_shared()  # what cp.async wrote, to be read by the tensor cores
                sm90_utils.gemm(
                    mma_s,
                    acc_s,
                    r_k[None, None, None, k_state.index],
                    r_q[None, None, None, q_state.index],
                    zero_init=True,
                )
                if first < n_local or first + ROWS > count:
                    mask_columns(acc_s, entries, start, first, count, n_local, key, lane)
                item_kl = item_kl + self.score_gradient(
                    acc_s,
                    r_ds,
                    my_lse + buffer * (4 * ROWS) + (lane % 4) * 8,
                    my_teacher + q_state.index * TEACHER_BYTES,
                    scale,
                    count - first - 2 * (lane % 4),
                )
                next_buffer = buffer ^ 1
                self.share_lse(lse, my_lse + next_buffer * (4 * ROWS), thread)
                if const_expr(self.grads):
                    store_ds(r_ds, dst_idx=buffer)
                    cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
                if const_expr(self.grads):
                    sm90_utils.gemm(
                        mma_dq,
                        acc_dq,
                        r_ds_s[None, None, None, buffer],
                        r_k_t[None, None, None, k_state.index],
                        zero_init=True,
                        wg_wait=-1,
                    )
                    sm90_utils.gemm(
                        mma_dk,
                        acc_dk,
                        r_ds,
                        r_q_t[None, None, None, q_state.index],
                        zero_init=False,
                        wg_wait=1,
                    )
                    self.store_dq(
                        acc_dq, entries, start, first + row, count, head, warpgroup_index, lane, partial
                    )
                    warpgroup.wait_group(0)
                q_pipe.consumer_release(q_state)
                q_state.advance()
                buffer = next_buffer
            k_pipe.consumer_release(k_state)
            k_state.advance()
            if const_expr(self.grads):
                store_part(acc_dk, parts, Int64(item) * PART, warpgroup_index, thread)
            for step in cutlass.range_constexpr(5):
                item_kl = item_kl + cute.arch.shuffle_sync_bfly(item_kl, offset=1 << step)
            cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
            if lane == 0:
                warp_sums[thread // 32] = item_kl
            cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
            if thread == 0:
                total = warp_sums[0]
                for i in cutlass.range_constexpr(1, CONSUMERS // 32):
                    total = total + warp_sums[i]
                kl[item] = total * Float32(LN2)
            position += cute.arch.grid_dim()[0]

    @cute.jit
    def load_lse(self, lse_proxy, entry, lse_base):
        """An entry's student LSE."""
        value = cute.make_rmem_tensor(1, Float32)
        at = lse_base + (entry & Int32(QUERY_MASK))
        device.load_vector(device.global_pointer(lse_proxy, at, Float32, 4), value)
        return value[0]

    @cute.jit
    def share_lse(self, lse, address, thread):
        """The first half of a warpgroup puts its entries' LSE, in base 2, into shared memory."""
        if thread % 128 < ROWS:
            target = device.shared_pointer(address + (thread % ROWS) * 4, Float32, 4)
            copy_utils.store(target, lse * Float32(LOG2E))

    @cute.jit
    def score_gradient(self, acc_s, r_ds, lse_address, teacher_address, scale, remaining):
        """student - teacher in bf16; returns this thread's part of the KL, in base 2.

        Column 8 * n + {0, 1} of this thread is an entry only if 8 * n < remaining: beyond, the teacher's
        memory holds anything. Entries come in pairs, of which backward writes both or none.
        """
        packed = cute.recast_tensor(r_ds, Int32)
        lse = cute.make_rmem_tensor(2, Float32)
        pair = cute.make_rmem_tensor(2, Int32)
        kl = Float32(0.0)
        tiny, lowest = Float32(1e-30), Float32(-1e30)  # for 0 * log 0, and for tokens outside the support
        for n in cutlass.range_constexpr(8):
            device.load_vector(device.shared_pointer(lse_address + n * 32, Float32, 8), lse)
            device.load_vector(
                device.shared_pointer(teacher_address + n * (TEACHER_GROUP * BLOCK * 2), Int32, 8), pair
            )
            for r in cutlass.range_constexpr(2):
                j = 4 * n + 2 * r
                taught = pair[r] if 8 * n < remaining else Int32(0)
                t0, t1 = device.low_bf16(taught), device.high_bf16(taught)
                s0, s1 = acc_s[j] * scale - lse[0], acc_s[j + 1] * scale - lse[1]  # log2 of the student
                if const_expr(self.grads):
                    packed[j // 2] = device.pack_bf16(
                        cute.math.exp2(s0, fastmath=True) - t0, cute.math.exp2(s1, fastmath=True) - t1
                    )
                log0 = cute.math.log2(cute.arch.fmax(t0, tiny), fastmath=True)
                log1 = cute.math.log2(cute.arch.fmax(t1, tiny), fastmath=True)
                kl = kl + (
                    t0 * (log0 - cute.arch.fmax(s0, lowest)) + t1 * (log1 - cute.arch.fmax(s1, lowest))
                )
        return kl

    @cute.jit
    def store_dq(self, acc_dq, entries, start, index, count, head, warpgroup_index, lane, partial):
        for r in cutlass.range_constexpr(2):
            mine = index + 8 * r
            packed = cute.make_rmem_tensor(8, Int32)
            for c in cutlass.range_constexpr(8):
                packed[c] = device.pack_bf16(acc_dq[4 * c + 2 * r], acc_dq[4 * c + 2 * r + 1])
            if mine < count:
                edge = device.edge_index(entries[start + mine], head, self.proxy_heads, self.slots)
                device.store_slot(partial, edge, 1, 0, lane % 4, packed, 2 * warpgroup_index, 2)


@cute.jit
def mask_columns(
    acc_s: cute.Tensor,
    entries: cute.Tensor,
    start: Int32,
    first: Int32,
    count: Int32,
    n_local: Int32,
    key: Int32,
    lane: Int32,
):
    """-inf for the keys after a query in its own block, and for columns past the list's end."""
    for n in cutlass.range_constexpr(8):
        for c in cutlass.range_constexpr(2):
            index = first + 8 * n + 2 * (lane % 4) + c
            entry = entries[start + cutlass.min(index, count - 1)]
            last = (entry & Int32(BLOCK - 1)) if index < n_local else Int32(BLOCK - 1)
            if index >= count:
                last = Int32(-1)
            for r in cutlass.range_constexpr(2):
                if key + 8 * r > last:
                    acc_s[4 * n + 2 * r + c] = -Float32.inf


@dataclass(unsafe_hash=True)
class SumKl:
    """The KL of each proxy head: its items' in a fixed order, and what is there already unless is_first."""

    proxy_heads: int

    def arguments(self):
        return (
            jit.tensor("f32"),  # KL by item
            jit.tensor("i32"),  # bucket_items
            jit.tensor("f32"),  # kl by proxy head
            Int32(1),  # key blocks of the chunk
            Int32(1),  # 1 in the first chunk
        )

    @cute.jit
    def __call__(
        self,
        item_kl: cute.Tensor,
        bucket_items: cute.Tensor,
        kl: cute.Tensor,
        n_blocks: Int32,
        is_first: Int32,
        stream,
    ):
        self.kernel(item_kl, bucket_items, kl, n_blocks, is_first).launch(
            grid=[self.proxy_heads, 1, 1], block=[512, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        item_kl: cute.Tensor,
        bucket_items: cute.Tensor,
        kl: cute.Tensor,
        n_blocks: Int32,
        is_first: Int32,
    ):
        head, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        sums = cute.make_tensor(SmemAllocator().allocate_array(Float32, 16), cute.make_layout(16))
        end = bucket_items[(head + 1) * n_blocks]
        item = bucket_items[head * n_blocks] + thread
        total = Float32(0.0)
        while item < end:
            total = total + item_kl[item]
            item += 512
        for step in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        if thread % 32 == 0:
            sums[thread // 32] = total
        cute.arch.sync_threads()
        if thread == 0:
            for i in cutlass.range_constexpr(1, 16):
                total = total + sums[i]
            if is_first == 0:
                total = total + kl[head]
            kl[head] = total
