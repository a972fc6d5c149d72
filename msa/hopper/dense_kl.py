"""The proxy's KL over all visible tokens, for warmup: eq. 9 and 10 of arXiv 2606.13392 without a selection.

No S x S tensor exists. `DenseLse` finds the student's logsumexp of each query. `DenseKl` keeps a key block's
K and k_proxy on chip and walks the tiles of 64 queries that see it: the scores of the G query heads one after
the other, exponentiated and added up to the teacher, then the proxy's. Scores stand transposed, keys down and
queries across: student - teacher feeds dk_proxy from registers, and through shared memory makes dq_proxy.

dk_proxy leaves as fp32 parts, summed in a fixed order. dq_proxy gets a contribution from every key block:
they are added in memory, in the accumulator's order, 16 bytes a thread; `RoundQueries` brings the sums into
rows. With `ordered` they come in the order of the key blocks, for the same bits every time.

The multiprocessors take items (sequence, proxy head, run of query tiles, key block) from a counter as they
get done with others: items differ in size, many see no query at all, and which do is known on the GPU alone.

Queries are one contiguous run that ends where the keys end: query block t lies in key block t + shift.
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
from msa.hopper.backward import PART, store_pair, store_part
from msa.hopper.device import BLOCK, CONSUMERS, LN2, LOG2E

ROWS = 64  # queries of a tile
STAGES = 6
LSE_STAGES = 4
ROW_BYTES = 2 * BLOCK
TILE_SUM = ROWS * BLOCK  # elements of a tile's dq_proxy


def tile_atom(tensor, layout, rows):
    """A TMA atom for (rows, 128) tiles of (B, S, heads, D), and its tensor as (S, D, heads, B)."""
    tensor = layout_utils.select(tensor, [1, 3, 2, 0])
    tile = cute.select(layout, mode=[0, 1])
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, tile, (rows, BLOCK))


@dataclass(unsafe_hash=True)
class DenseLse:
    """log2 of each query's sum of exponentiated proxy scores over all that it sees: (B, Hp, row tiles * 64).

    One CTA a (128 queries, proxy head). A thread keeps the maximum and the sum of its own columns; they meet
    at the end. Rows past the sequence get inf, so that their probabilities are 0.
    """

    proxy_heads: int

    def arguments(self):
        return (
            jit.batch("bf16", self.proxy_heads, BLOCK),  # q_proxy (B, S, Hp, D)
            jit.batch("bf16", 1, BLOCK),  # k_proxy (B, Sk, 1, D)
            jit.tensor("i32"),  # doc_start_block (B * query blocks,), or empty: all 0
            jit.tensor("f32"),  # lse, base 2
            Float32(1.0),  # scale
        )

    @cute.jit
    def __call__(
        self,
        q_proxy: cute.Tensor,
        k_proxy: cute.Tensor,
        doc_start_block: cute.Tensor,
        lse: cute.Tensor,
        scale: Float32,
        stream,
    ):
        mma = sm90_utils.make_tiled_mma(BFloat16, "K", "K", BLOCK, atom_layout_mnk=(2, 1, 1))
        q_layout = sm90_utils.make_smem_layout(BFloat16, LayoutEnum.ROW_MAJOR, (BLOCK, BLOCK), 1)
        k_layout = sm90_utils.make_smem_layout(BFloat16, LayoutEnum.ROW_MAJOR, (BLOCK, BLOCK), LSE_STAGES)
        q_atom, q_tma = tile_atom(q_proxy, q_layout, BLOCK)
        k_atom, k_tma = tile_atom(k_proxy, k_layout, BLOCK)

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * LSE_STAGES]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], 1024]

        self.storage = Storage
        batch, queries, keys = q_proxy.shape[0], q_proxy.shape[1], k_proxy.shape[1]
        self.kernel(
            q_atom, q_tma, k_atom, k_tma, doc_start_block, lse, queries, (keys - queries) // BLOCK,
            scale * Float32(LOG2E), mma, q_layout, k_layout,
        ).launch(
            grid=[self.proxy_heads, batch, cute.ceil_div(queries, BLOCK)],
            block=[128 + CONSUMERS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q_proxy: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_proxy: cute.Tensor,
        doc_start_block: cute.Tensor,
        lse: cute.Tensor,
        queries: Int32,
        shift: Int32,
        scale: Float32,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.storage)
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        q_pipe = device.tma_pipeline(storage.q_barriers, 1, BLOCK * ROW_BYTES)
        k_pipe = device.tma_pipeline(storage.k_barriers, LSE_STAGES, BLOCK * ROW_BYTES)
        # The last queries see the most blocks: they start first, so that short ones fill the end.
        head, sequence, tile = cute.arch.block_idx()
        tiles = cute.arch.grid_dim()[2]
        tile = tiles - 1 - tile
        first = Int32(0)
        if doc_start_block.shape[0] > 0:
            first = doc_start_block[sequence * tiles + tile]
        local = tile + shift
        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                g_q = cute.local_tile(q_proxy[None, None, head, sequence], (BLOCK, BLOCK), (None, 0))
                g_k = cute.local_tile(k_proxy[None, None, 0, sequence], (BLOCK, BLOCK), (None, 0))
                load_q, _, _ = copy_utils.tma_get_copy_fn(q_atom, 0, cute.make_layout(1), g_q, s_q)
                load_k, _, _ = copy_utils.tma_get_copy_fn(k_atom, 0, cute.make_layout(1), g_k, s_k)
                q_state, k_state = device.producer_state(1), device.producer_state(LSE_STAGES)
                q_pipe.producer_acquire(q_state)
                load_q(tile, 0, tma_bar_ptr=q_pipe.producer_get_barrier(q_state))
                # The own block first: the consumers' maxima are finite from then on.
                for i in cutlass.range(local - first + 1, unroll=1):
                    k_pipe.producer_acquire(k_state)
                    load_k(local - i, k_state.index, tma_bar_ptr=k_pipe.producer_get_barrier(k_state))
                    k_state.advance()
        else:
            cute.arch.setmaxregister_increase(240)
            thread = cute.arch.thread_idx()[0] - 128
            lane = thread % 32
            warpgroup_index = cute.arch.make_warp_uniform(thread // 128)
            mma_slice = mma.get_slice(cute.make_layout(2, stride=128)(warpgroup_index))
            shape = (BLOCK, BLOCK, BLOCK)
            acc, r_q, r_k = sm90_utils.partition_fragment_ABC(mma_slice, shape, s_q, s_k)
            acc2, _, _ = sm90_utils.partition_fragment_ABC(mma_slice, shape, s_q, s_k)
            row = (thread // 32) * 16 + lane // 4
            tops, sums = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
            # Columns that hide all of a thread's keys leave its maximum here, not at -inf.
            tops.fill(-1e30)
            sums.fill(0.0)
            q_pipe.consumer_wait(device.consumer_state(1))
            k_state = device.consumer_state(LSE_STAGES)
            k_pipe.consumer_wait(k_state)
            sm90_utils.gemm(
                mma, acc, r_q[None, None, None, 0], r_k[None, None, None, k_state.index], zero_init=True
            )
            k_pipe.consumer_release(k_state)
            k_state.advance()
            scores = layout_utils.reshape_acc_to_mn(acc)
            for r in cutlass.range_constexpr(2):
                last = row + 8 * r - (lane % 4) * 2
                for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                    if Int32((c // 2) * 8 + c % 2) > last:
                        scores[r, c] = -Float32.inf
            add_scores(acc, tops, sums, scale)
            earlier = local - first
            for _ in cutlass.range(earlier // 2, unroll=1):
                first_state = k_state.clone()
                k_pipe.consumer_wait(k_state)
                sm90_utils.gemm(
                    mma, acc, r_q[None, None, None, 0], r_k[None, None, None, k_state.index], zero_init=True,
                    wg_wait=-1,
                )  # fmt: skip
                k_state.advance()
                k_pipe.consumer_wait(k_state)
                sm90_utils.gemm(
                    mma, acc2, r_q[None, None, None, 0], r_k[None, None, None, k_state.index], zero_init=True,
                    wg_wait=1,
                )  # fmt: skip
                k_pipe.consumer_release(first_state)
                add_scores(acc, tops, sums, scale)
                warpgroup.wait_group(0)
                k_pipe.consumer_release(k_state)
                k_state.advance()
                add_scores(acc2, tops, sums, scale)
            if earlier % 2 == 1:
                k_pipe.consumer_wait(k_state)
                sm90_utils.gemm(
                    mma, acc, r_q[None, None, None, 0], r_k[None, None, None, k_state.index], zero_init=True
                )
                k_pipe.consumer_release(k_state)
                add_scores(acc, tops, sums, scale)
            rows = cute.ceil_div(queries, ROWS) * ROWS
            base = Int64(sequence * self.proxy_heads + head) * rows
            for r in cutlass.range_constexpr(2):
                top, total = tops[r], sums[r]
                for step in cutlass.range_constexpr(2):
                    other_top = cute.arch.shuffle_sync_bfly(top, offset=1 << step)
                    other = cute.arch.shuffle_sync_bfly(total, offset=1 << step)
                    both = cute.arch.fmax(top, other_top)
                    total = total * cute.math.exp2(top - both, fastmath=True) + other * cute.math.exp2(
                        other_top - both, fastmath=True
                    )
                    top = both
                at = tile * BLOCK + row + 8 * r
                value = top + cute.math.log2(total, fastmath=True) if at < queries else Float32.inf
                if lane % 4 == 0 and at < rows:
                    copy_utils.store(device.global_pointer(lse, base + at, Float32, 4), value)


@cute.jit
def add_scores(acc: cute.Tensor, tops: cute.Tensor, sums: cute.Tensor, scale: Float32):
    """Takes a tile's scores into this thread's running maxima (times scale) and sums."""
    scores = layout_utils.reshape_acc_to_mn(acc)
    columns = cute.size(scores, mode=[1])
    for r in cutlass.range_constexpr(2):
        best = [scores[r, u] for u in range(4)]
        for c in cutlass.range_constexpr(4, columns, 4):
            for u in cutlass.range_constexpr(4):
                best[u] = cute.arch.fmax(best[u], scores[r, c + u])
        top = cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3])) * scale
        top = cute.arch.fmax(top, tops[r])
        parts = [sums[r] * cute.math.exp2(tops[r] - top, fastmath=True)] + [Float32(0.0) for _ in range(3)]
        for c in cutlass.range_constexpr(0, columns, 4):
            for u in cutlass.range_constexpr(4):
                parts[u] = parts[u] + cute.math.exp2(scores[r, c + u] * scale - top, fastmath=True)
        tops[r] = top
        sums[r] = (parts[0] + parts[1]) + (parts[2] + parts[3])


@dataclass(unsafe_hash=True)
class DenseKl:
    """Work is cut into (sequence, proxy head, run of query tiles, key block), in this order: multiprocessors
    walk the same queries side by side and find them in L2. An item's number is that of its key block's parts:
    (proxy head, sequence, key block, run), as SumKeys and SumKl take them.
    """

    heads: int
    kv_heads: int
    proxy_heads: int
    grads: bool
    ordered: bool = False

    def __post_init__(self):
        self.group = self.heads // self.proxy_heads

    def arguments(self):
        return (
            jit.batch("bf16", self.heads, BLOCK),  # q (B, S, H, D)
            jit.batch("bf16", self.kv_heads, BLOCK),  # k (B, Sk, Hkv, D)
            jit.batch("bf16", self.proxy_heads, BLOCK),  # q_proxy (B, S, Hp, D)
            jit.batch("bf16", 1, BLOCK),  # k_proxy (B, Sk, 1, D)
            jit.tensor("f32"),  # lse (B, H, row tiles * 64), base 2, inf past S
            jit.tensor("f32"),  # lse_proxy (B, Hp, row tiles * 64), base 2, inf past S
            jit.tensor("i32"),  # doc_start_block (B * query blocks,), or empty: all 0
            jit.tensor("i32"),  # last_query_block + 1 of each key block (B * key blocks,), or empty: all
            jit.tensor("f32", PART),  # dk_proxy parts, by item
            jit.tensor("f32", TILE_SUM),  # dq_proxy sums (B * Hp * row tiles), zero before
            jit.tensor("f32"),  # KL by item, nats
            jit.tensor("i32"),  # items handed out so far (1,), zero before
            jit.tensor("i32"),  # turns (B * Hp * row tiles,), zero before; for `ordered`
            Int32(1),  # runs of a key block
            Int32(1),  # query tiles of a run
            Float32(1.0),  # scale
            Int32(1),  # multiprocessors
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        q_proxy: cute.Tensor,
        k_proxy: cute.Tensor,
        lse: cute.Tensor,
        lse_proxy: cute.Tensor,
        doc_start_block: cute.Tensor,
        query_end: cute.Tensor,
        parts: cute.Tensor,
        sums: cute.Tensor,
        kl: cute.Tensor,
        handed_out: cute.Tensor,
        turns: cute.Tensor,
        runs: Int32,
        run_tiles: Int32,
        scale: Float32,
        grid: Int32,
        stream,
    ):
        # K, the first operand, comes from registers: read from shared memory with every 64 queries, it would
        # take all of its bandwidth.
        mma_s = sm90_utils.make_tiled_mma(BFloat16, "K", "K", ROWS, source="RS", atom_layout_mnk=(2, 1, 1))
        mma_p = sm90_utils.make_tiled_mma(BFloat16, "K", "K", ROWS, atom_layout_mnk=(2, 1, 1))
        mma_dk = sm90_utils.make_tiled_mma(BFloat16, "K", "MN", BLOCK, source="RS", atom_layout_mnk=(2, 1, 1))
        mma_dq = sm90_utils.make_tiled_mma(BFloat16, "K", "MN", 64, atom_layout_mnk=(1, 2, 1))
        q_layout = sm90_utils.make_smem_layout(BFloat16, LayoutEnum.ROW_MAJOR, (ROWS, BLOCK), STAGES)
        k_layout = sm90_utils.make_smem_layout(BFloat16, LayoutEnum.ROW_MAJOR, (BLOCK, BLOCK), 1)
        ds_layout = sm90_utils.make_smem_layout(
            BFloat16, LayoutEnum.ROW_MAJOR, (ROWS, BLOCK), 2, major_mode_size=64
        )
        q_atom, q_tma = tile_atom(q, q_layout, ROWS)
        qp_atom, qp_tma = tile_atom(q_proxy, q_layout, ROWS)
        k_atom, k_tma = tile_atom(k, k_layout, BLOCK)
        kp_atom, kp_tma = tile_atom(k_proxy, k_layout, BLOCK)

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            item: cute.struct.MemRange[Int32, 4]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, ROWS * STAGES], 128]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, CONSUMERS // 32], 128]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], 1024]
            k_proxy: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(ds_layout)], 1024]

        self.storage = Storage
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        self.kernel(
            q_atom, q_tma, k_atom, k_tma, qp_atom, qp_tma, kp_atom, kp_tma, lse, lse_proxy, doc_start_block,
            query_end, parts, sums, kl, handed_out, turns, batch, queries, keys, runs, run_tiles,
            scale * Float32(LOG2E), mma_s, mma_p, mma_dk, mma_dq, q_layout, k_layout, ds_layout,
        ).launch(
            grid=[grid, 1, 1], block=[128 + CONSUMERS, 1, 1], stream=stream, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q: cute.Tensor,
        k_atom: cute.CopyAtom,
        k: cute.Tensor,
        qp_atom: cute.CopyAtom,
        q_proxy: cute.Tensor,
        kp_atom: cute.CopyAtom,
        k_proxy: cute.Tensor,
        lse: cute.Tensor,
        lse_proxy: cute.Tensor,
        doc_start_block: cute.Tensor,
        query_end: cute.Tensor,
        parts: cute.Tensor,
        sums: cute.Tensor,
        kl: cute.Tensor,
        handed_out: cute.Tensor,
        turns: cute.Tensor,
        batch: Int32,
        queries: Int32,
        keys: Int32,
        runs: Int32,
        run_tiles: Int32,
        scale: Float32,
        mma_s: cute.TiledMma,
        mma_p: cute.TiledMma,
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
        s_kp = storage.k_proxy.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_ds = storage.ds.get_tensor(ds_layout.outer, swizzle=ds_layout.inner)
        warp_sums = cute.make_tensor(storage.sums.data_ptr(), cute.make_layout(CONSUMERS // 32))
        item = cute.make_tensor(storage.item.data_ptr(), cute.make_layout(1))
        lse_address = storage.lse.data_ptr().toint()
        q_pipe = device.tma_pipeline(storage.q_barriers, STAGES, ROWS * ROW_BYTES + 4 * ROWS)
        # Full when K and k_proxy are there, and the number of the item.
        k_pipe = device.tma_pipeline(storage.k_barriers, 1, 2 * BLOCK * ROW_BYTES, producers=2)
        blocks = cute.ceil_div(keys, BLOCK)
        shape = (batch, queries, blocks, (keys - queries) // BLOCK, runs, run_tiles)
        n_items = batch * self.proxy_heads * runs * blocks
        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                self.produce(
                    q_atom, q, k_atom, k, qp_atom, q_proxy, kp_atom, k_proxy, s_q, s_k, s_kp, lse_address,
                    item, q_pipe, k_pipe, lse, lse_proxy, query_end, handed_out, shape, n_items,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(240)
            self.consume(
                s_q, s_k, s_kp, s_ds, lse_address, item, warp_sums, mma_s, mma_p, mma_dk, mma_dq, q_pipe,
                k_pipe, doc_start_block, query_end, parts, sums, kl, turns, shape, n_items, scale,
            )  # fmt: skip

    @cute.jit
    def locate(self, position, shape, query_end):
        """An item's sequence, proxy head, run, key block, and its query tiles [begin, end)."""
        _, queries, blocks, shift, runs, run_tiles = shape
        block = position % blocks
        run = position // blocks % runs
        head = position // (blocks * runs) % self.proxy_heads
        sequence = position // (blocks * runs * self.proxy_heads)
        tiles = cute.ceil_div(queries, ROWS)
        begin = cutlass.max(2 * (block - shift), run * run_tiles)
        end = cutlass.min(tiles, (run + 1) * run_tiles)
        if query_end.shape[0] > 0:
            end = cutlass.min(end, 2 * query_end[sequence * blocks + block])
        return sequence, head, run, block, begin, end

    @cute.jit
    def produce(
        self, q_atom, q, k_atom, k, qp_atom, q_proxy, kp_atom, k_proxy, s_q, s_k, s_kp, lse_address, item,
        q_pipe, k_pipe, lse, lse_proxy, query_end, handed_out, shape, n_items,
    ):  # fmt: skip
        lane = cute.arch.lane_idx()
        rows = cute.ceil_div(shape[1], ROWS) * ROWS
        q_state, k_state = device.producer_state(STAGES), device.producer_state(1)
        position = Int32(0)
        while position < n_items:
            if lane == 0:
                position = cute.arch.atomic_add(handed_out.iterator, Int32(1))
            position = cute.arch.shuffle_sync(position, 0)
            # The first position past the end comes with the keys of the last item, and no queries.
            sequence, head, _, block, begin, end = self.locate(
                cutlass.min(position, n_items - 1), shape, query_end
            )
            kv_head = head // (self.proxy_heads // self.kv_heads)
            g_k = cute.local_tile(k[None, None, kv_head, sequence], (BLOCK, BLOCK), (None, 0))
            g_kp = cute.local_tile(k_proxy[None, None, 0, sequence], (BLOCK, BLOCK), (None, 0))
            load_k, _, _ = copy_utils.tma_get_copy_fn(k_atom, 0, cute.make_layout(1), g_k, s_k)
            load_kp, _, _ = copy_utils.tma_get_copy_fn(kp_atom, 0, cute.make_layout(1), g_kp, s_kp)
            k_pipe.producer_acquire(k_state)
            barrier = k_pipe.producer_get_barrier(k_state)
            load_k(block, 0, tma_bar_ptr=barrier)
            load_kp(block, 0, tma_bar_ptr=barrier)
            if lane == 0:
                item[0] = position
                cute.arch.mbarrier_arrive(barrier)
            k_state.advance()
            if position >= n_items:
                end = begin
            g_qp = cute.local_tile(q_proxy[None, None, head, sequence], (ROWS, BLOCK), (None, 0))
            load_qp, _, _ = copy_utils.tma_get_copy_fn(qp_atom, 0, cute.make_layout(1), g_qp, s_q)
            lse_base = Int64(sequence * self.heads + head * self.group) * rows
            proxy_base = Int64(sequence * self.proxy_heads + head) * rows
            for tile in cutlass.range(begin, end, unroll=1):
                for g in cutlass.range(self.group, unroll=1):
                    g_q = cute.local_tile(
                        q[None, None, head * self.group + g, sequence], (ROWS, BLOCK), (None, 0)
                    )
                    load_q, _, _ = copy_utils.tma_get_copy_fn(q_atom, 0, cute.make_layout(1), g_q, s_q)
                    q_pipe.producer_acquire(q_state)
                    barrier = q_pipe.producer_get_barrier(q_state)
                    load_q(tile, q_state.index, tma_bar_ptr=barrier)
                    if lane == 0:
                        source = device.global_pointer(lse, lse_base + Int64(g * rows + tile * ROWS), Float32)
                        device.bulk_load(
                            lse_address + q_state.index * (4 * ROWS), source, 4 * ROWS, barrier.toint()
                        )
                    q_state.advance()
                q_pipe.producer_acquire(q_state)
                barrier = q_pipe.producer_get_barrier(q_state)
                load_qp(tile, q_state.index, tma_bar_ptr=barrier)
                if lane == 0:
                    source = device.global_pointer(lse_proxy, proxy_base + Int64(tile * ROWS), Float32)
                    device.bulk_load(
                        lse_address + q_state.index * (4 * ROWS), source, 4 * ROWS, barrier.toint()
                    )
                q_state.advance()

    @cute.jit
    def consume(
        self, s_q, s_k, s_kp, s_ds, lse_address, item, warp_sums, mma_s, mma_p, mma_dk, mma_dq, q_pipe,
        k_pipe, doc_start_block, query_end, parts, sums, kl, turns, shape, n_items, scale,
    ):  # fmt: skip
        batch, queries, blocks, shift, runs, _ = shape
        thread = cute.arch.thread_idx()[0] - 128
        lane = thread % 32
        warpgroup_index = cute.arch.make_warp_uniform(thread // 128)
        slices = cute.make_layout(2, stride=128)
        s_q_t, s_kp_t, s_ds_t = [layout_utils.transpose_view(x) for x in (s_q, s_kp, s_ds)]
        fragments = sm90_utils.partition_fragment_ABC
        acc0, r_k, r_q = fragments(mma_s.get_slice(slices(warpgroup_index)), (BLOCK, ROWS, BLOCK), None, s_q)
        acc1, r_kp, r_qp = fragments(
            mma_p.get_slice(slices(warpgroup_index)), (BLOCK, ROWS, BLOCK), s_kp, s_q
        )
        acc_dk, r_ds, r_q_t = fragments(
            mma_dk.get_slice(slices(warpgroup_index)), (BLOCK, BLOCK, ROWS), None, s_q_t
        )
        acc_dq, r_ds_s, r_kp_t = fragments(
            mma_dq.get_slice(slices(warpgroup_index)), (ROWS, BLOCK, BLOCK), s_ds, s_kp_t
        )
        store_ds, _, _ = copy_utils.get_smem_store_C(
            mma_p, s_ds_t, thread, transpose=True, position_independent=True, major_mode_size=64
        )
        # While one head's scores are exponentiated, the next one's are multiplied. With `ordered` registers
        # don't suffice for that.
        accs = (acc0,) if const_expr(self.ordered) else (acc0, acc1)
        load_a = cute.make_tiled_copy_A(
            cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(False, 4), BFloat16), mma_s
        ).get_slice(thread)
        teacher = cute.make_rmem_tensor(cute.size(acc0), Float32)
        q_state, k_state = device.consumer_state(STAGES), device.consumer_state(1)
        my_lse = lse_address + (lane % 4) * 8
        tiles = cute.ceil_div(queries, ROWS)
        buffer = Int32(0)
        k_pipe.consumer_wait(k_state)
        position = item[0]
        while position < n_items:
            sequence, head, _, block, begin, end = self.locate(position, shape, query_end)
            first_place = (sequence * self.proxy_heads + head) * tiles
            diagonal_end = 2 * (block - shift) + 2
            acc_dk.fill(0.0)
            item_kl = Float32(0.0)
            if begin < end:
                cute.copy(load_a, load_a.partition_S(s_k[None, None, 0]), load_a.retile(r_k))
                for tile in cutlass.range(begin, end, unroll=1):
                    teacher.fill(0.0)
                    for g in cutlass.range_constexpr(self.group + 1):
                        acc = accs[g % len(accs)]
                        q_pipe.consumer_wait(q_state)
                        wait = 1 if const_expr(g > 0) else -1
                        if const_expr(self.ordered):
                            wait = 0
                        if const_expr(g < self.group):
                            sm90_utils.gemm(
                                mma_s, acc, r_k, r_q[None, None, None, q_state.index], zero_init=True,
                                wg_wait=wait,
                            )  # fmt: skip
                        else:
                            sm90_utils.gemm(
                                mma_p, acc, r_kp[None, None, None, 0], r_qp[None, None, None, q_state.index],
                                zero_init=True, wg_wait=wait,
                            )  # fmt: skip
                        if const_expr(self.ordered and g < self.group):
                            self.add_teacher(acc, teacher, my_lse + q_state.index * (4 * ROWS), scale)
                            q_pipe.consumer_release(q_state)
                        if const_expr(not self.ordered and g > 0):
                            earlier = self.earlier(q_state)
                            last = accs[(g - 1) % 2]
                            self.add_teacher(last, teacher, my_lse + earlier.index * (4 * ROWS), scale)
                            q_pipe.consumer_release(earlier)
                        if const_expr(g < self.group):
                            q_state.advance()
                    warpgroup.wait_group(0)
                    acc_p = accs[self.group % len(accs)]
                    if tile < diagonal_end:
                        mask_diagonal(acc_p, teacher, (tile % 2) * ROWS)
                    item_kl = item_kl + self.score_gradient(
                        acc_p, teacher, r_ds, my_lse + q_state.index * (4 * ROWS), scale
                    )
                    if const_expr(self.grads):
                        store_ds(r_ds, dst_idx=buffer)
                        cute.arch.fence_view_async_shared()
                        cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
                        sm90_utils.gemm(
                            mma_dq, acc_dq, r_ds_s[None, None, None, buffer], r_kp_t[None, None, None, 0],
                            zero_init=True, wg_wait=-1,
                        )  # fmt: skip
                        sm90_utils.gemm(
                            mma_dk, acc_dk, r_ds, r_q_t[None, None, None, q_state.index], zero_init=False,
                            wg_wait=1,
                        )  # fmt: skip
                        place = first_place + tile
                        if const_expr(self.ordered):
                            warpgroup.wait_group(0)
                            self.wait_turn(
                                turns, doc_start_block, position, shape, query_end, tile, place, thread
                            )
                        offset = (
                            Int64(place) * TILE_SUM + warpgroup_index * (TILE_SUM // 2) + (thread % 128) * 4
                        )
                        for u in cutlass.range_constexpr(8):
                            device.add_vector(
                                device.global_pointer(sums, offset + u * 512, Float32),
                                [acc_dq[4 * u + i] for i in range(4)],
                            )
                        if const_expr(self.ordered):
                            self.end_turn(turns, place, thread)
                        warpgroup.wait_group(0)
                        buffer = buffer ^ 1
                    q_pipe.consumer_release(q_state)
                    q_state.advance()
            k_pipe.consumer_release(k_state)
            k_state.advance()
            # Found again, rather than kept in registers through the loop.
            sequence, head, run, block, _, _ = self.locate(position, shape, query_end)
            number = ((head * batch + sequence) * blocks + block) * runs + run
            if const_expr(self.grads):
                store_part(acc_dk, parts, Int64(number) * PART, warpgroup_index, thread)
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
                kl[number] = total * Float32(LN2)
            k_pipe.consumer_wait(k_state)
            position = item[0]

    def earlier(self, state):
        """The pipeline state one stage before `state`."""
        before = state.clone()
        before.reverse()
        return before

    @cute.jit
    def add_teacher(self, acc, teacher, lse_address, scale):
        """Adds a head's probabilities. What the mask hides may be anything here: it is 0 in the end."""
        lse = cute.make_rmem_tensor(2, Float32)
        for n in cutlass.range_constexpr(8):
            device.load_vector(device.shared_pointer(lse_address + n * 32, Float32, 8), lse)
            for i in cutlass.range_constexpr(4):
                j = 4 * n + i
                teacher[j] = teacher[j] + cute.math.exp2(acc[j] * scale - lse[i % 2], fastmath=True)

    @cute.jit
    def score_gradient(self, acc, teacher, r_ds, lse_address, scale):
        """student - teacher in bf16; returns this thread's part of the KL, in base 2."""
        packed = cute.recast_tensor(r_ds, Int32)
        lse = cute.make_rmem_tensor(2, Float32)
        kl = Float32(0.0)
        mean = Float32(1.0 / self.group)
        tiny, lowest = Float32(1e-30), Float32(-1e30)  # for 0 * log 0, and for tokens outside the support
        for n in cutlass.range_constexpr(8):
            device.load_vector(device.shared_pointer(lse_address + n * 32, Float32, 8), lse)
            for r in cutlass.range_constexpr(2):
                j = 4 * n + 2 * r
                t0, t1 = teacher[j] * mean, teacher[j + 1] * mean
                s0, s1 = acc[j] * scale - lse[0], acc[j + 1] * scale - lse[1]  # log2 of the student
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
    def wait_turn(self, turns, doc_start_block, position, shape, query_end, tile, place, thread):
        """Waits until the key blocks before this one have added theirs to a tile."""
        if thread == 0:
            sequence, _, _, block, _, _ = self.locate(position, shape, query_end)
            turn = block
            if doc_start_block.shape[0] > 0:
                turn = block - doc_start_block[sequence * cute.ceil_div(shape[1], BLOCK) + tile // 2]
            pointer = turns.iterator + place
            seen = cute.arch.load(pointer, Int32, sem="acquire", scope="gpu")
            while seen != turn:
                seen = cute.arch.load(pointer, Int32, sem="acquire", scope="gpu")
        cute.arch.barrier(barrier_id=2, number_of_threads=CONSUMERS)

    @cute.jit
    def end_turn(self, turns, place, thread):
        cute.arch.fence_acq_rel_gpu()
        cute.arch.barrier(barrier_id=2, number_of_threads=CONSUMERS)
        if thread == 0:
            cute.arch.atomic_add(turns.iterator + place, Int32(1), sem="release", scope="gpu")


@cute.jit
def mask_diagonal(acc: cute.Tensor, teacher: cute.Tensor, first_column: Int32):
    """Nothing for the keys after a query in its own block: neither teacher nor student."""
    thread = cute.arch.thread_idx()[0] - 128
    lane = thread % 32
    key = (thread // 32) * 16 + lane // 4
    for n in cutlass.range_constexpr(8):
        for c in cutlass.range_constexpr(2):
            query = first_column + 8 * n + 2 * (lane % 4) + c
            for r in cutlass.range_constexpr(2):
                if key + 8 * r > query:
                    acc[4 * n + 2 * r + c] = -Float32.inf
                    teacher[4 * n + 2 * r + c] = Float32(0.0)


@dataclass(unsafe_hash=True)
class RoundQueries:
    """dq_proxy from its sums, times scale and the KL's gradient: (B, S, Hp, D) bf16."""

    proxy_heads: int

    def arguments(self):
        return (
            jit.tensor("f32", TILE_SUM),
            jit.tensor("f32"),  # gradient of kl, one element
            jit.batch("bf16", self.proxy_heads, BLOCK),
            Float32(1.0),
        )

    @cute.jit
    def __call__(self, sums: cute.Tensor, grad_kl: cute.Tensor, out: cute.Tensor, factor: Float32, stream):
        self.kernel(sums, grad_kl, out, factor).launch(
            grid=[sums.shape[0], 1, 1], block=[CONSUMERS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, sums: cute.Tensor, grad_kl: cute.Tensor, out: cute.Tensor, factor: Float32):
        place, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        queries = out.shape[1]
        tiles = cute.ceil_div(queries, ROWS)
        tile, head = place % tiles, place // tiles % self.proxy_heads
        sequence = place // (tiles * self.proxy_heads)
        lane, half = thread % 32, thread // 128
        query = tile * ROWS + ((thread % 128) // 32) * 16 + lane // 4
        factor = factor * grad_kl[0]
        values = cute.make_rmem_tensor(4, Float32)
        for u in cutlass.range_constexpr(8):
            source = Int64(place) * TILE_SUM + half * (TILE_SUM // 2) + u * 512 + (thread % 128) * 4
            device.load_vector(device.global_pointer(sums, source, Float32), values)
            column = half * 64 + 8 * u + 2 * (lane % 4)
            for r in cutlass.range_constexpr(2):
                if query + 8 * r < queries:
                    at = (Int64(sequence) * queries + query + 8 * r) * self.proxy_heads + head
                    value = device.pack_bf16(values[2 * r] * factor, values[2 * r + 1] * factor)
                    store_pair(out, at * BLOCK + column, value)
