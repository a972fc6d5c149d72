"""Selection: proxy scores, their maximum per key block and the best blocks of each query, in one kernel.

Scores never leave the registers. Only blocks strictly before a query's own are scored, and its 128 queries
see those as a whole, so nothing is masked. Blocks are ranked in full fp32.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from quack import copy_utils, layout_utils, sm90_utils

from msa.hopper import device, jit
from msa.hopper.device import BLOCK, CONSUMERS
from msa.hopper.launch import nothing

STAGES = 4  # K tiles in flight
EMPTY = -(2**31)  # ranks below -inf
INFINITY_BITS = 0x7F800000
LOCAL_THREADS = 256


@dataclass(unsafe_hash=True)
class Select:
    """One CTA per (128 queries, proxy head): a producer warp and two consumer warpgroups of 64 rows each.

    All heads share k_proxy. Where their number is even, those of a tile come in clusters of two CTAs, each of
    which loads half of a K block into the shared memory of both.

    K blocks come in pairs, one accumulator each. In an accumulator two rows, 8 apart, are spread over four
    neighbouring lanes, a quad. A pair gives a quad four scores, (row, block of the pair): each exchange of
    the reduction over the quad hands over what the other lane keeps, so that three shuffles leave one in
    each lane. A lane keeps the best of those in registers; the two lists of a row are merged at the end.

    At 1M tokens the card is capped in power. Hence queries in registers, K shared, and maxima of ints, for
    which one instruction compares three.
    """

    proxy_heads: int
    slots: int

    def __post_init__(self):
        self.cluster = 2 if self.proxy_heads % 2 == 0 else 1

    def arguments(self):
        return (
            jit.batch("bf16", self.proxy_heads, BLOCK),  # q_proxy (B, S, Hp, 128)
            jit.batch("bf16", 1, BLOCK),  # k_proxy (B, Sk, 1, 128)
            jit.tensor("i32"),  # q_block (query tiles of a sequence,), or empty: 0, 1, ...
            jit.batch("i32"),  # doc_start_block (B, query tiles of a sequence), or empty: all 0
            jit.batch("i32", self.proxy_heads, self.slots),  # block_indices (B, S, Hp, slots), written
        )

    @cute.jit
    def __call__(
        self,
        q_proxy: cute.Tensor,
        k_proxy: cute.Tensor,
        q_block: cute.Tensor,
        doc_start_block: cute.Tensor,
        block_indices: cute.Tensor,
        stream,
    ):
        batch, queries = block_indices.shape[:2]
        doc_start_block = device.flatten(doc_start_block)
        block_indices = device.flatten(block_indices, self.proxy_heads, self.slots)
        if const_expr(self.slots == 1):
            self.local_kernel(q_block, block_indices, queries).launch(
                grid=[cute.ceil_div(batch * queries, LOCAL_THREADS), 1, 1],
                block=[LOCAL_THREADS, 1, 1],
                stream=stream,
            )
        else:
            key_blocks = cute.ceil_div(k_proxy.shape[1], BLOCK)
            k_proxy = device.flatten(k_proxy, BLOCK)
            q_by_head = layout_utils.select(device.flatten(q_proxy, self.proxy_heads, BLOCK), [0, 2, 1])
            mma = sm90_utils.make_tiled_mma(BFloat16, "K", "K", BLOCK, source="RS", atom_layout_mnk=(2, 1, 1))
            layout = device.rows_layout(BLOCK, STAGES)
            tile = cute.select(layout, mode=[0, 1])
            load = cpasync.CopyBulkTensorTileG2SOp()
            q_atom, q_tiles = cpasync.make_tiled_tma_atom(load, q_by_head, tile, (BLOCK, BLOCK))
            if const_expr(self.cluster > 1):
                load = cpasync.CopyBulkTensorTileG2SMulticastOp()
            k_atom, k_tiles = cpasync.make_tiled_tma_atom(
                load, k_proxy, tile, (BLOCK, BLOCK), num_multicast=self.cluster
            )

            @cute.struct
            class Storage:
                q_barriers: cute.struct.MemRange[Int64, 2]
                k_barriers: cute.struct.MemRange[Int64, 2 * STAGES]
                q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(tile)], 1024]
                k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout)], 1024]

            self.kernel(
                q_atom,
                q_tiles,
                k_atom,
                k_tiles,
                q_block,
                doc_start_block,
                block_indices,
                batch,
                queries,
                key_blocks,
                mma,
                tile,
                layout,
                Storage,
            ).launch(
                grid=[batch * cute.ceil_div(queries, BLOCK) * self.proxy_heads, 1, 1],
                block=[CONSUMERS + 128, 1, 1],
                cluster=[self.cluster, 1, 1],
                stream=stream,
                min_blocks_per_mp=1,
            )

    @cute.kernel
    def local_kernel(self, q_block: cute.Tensor, block_indices: cute.Tensor, queries: Int32):
        """With one slot there is nothing to rank: a thread writes its query's own block for all heads."""
        row = cute.arch.block_idx()[0] * LOCAL_THREADS + cute.arch.thread_idx()[0]
        if row < block_indices.shape[0]:
            local = row % queries // BLOCK
            if q_block.shape[0] > 0:
                local = q_block[local]
            offset = Int64(row) * self.proxy_heads
            heads = device.global_pointer(block_indices, offset, Int32, align=4)
            heads = cute.make_tensor(heads, cute.make_layout(self.proxy_heads))
            for head in cutlass.range_constexpr(self.proxy_heads):
                heads[head] = local

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q_tiles: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_tiles: cute.Tensor,
        q_block: cute.Tensor,
        doc_start_block: cute.Tensor,
        block_indices: cute.Tensor,
        batch: Int32,
        queries: Int32,
        key_blocks: Int32,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        Storage: cutlass.Constexpr,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(Storage)
        shared_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        shared_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        tile_bytes = cute.size_in_bytes(BFloat16, q_layout)
        q_pipeline = device.tma_pipeline(storage.q_barriers, 1, tile_bytes)
        k_pipeline = device.tma_pipeline(storage.k_barriers, STAGES, tile_bytes, cluster=self.cluster)

        # The last queries see the most blocks: they start first, so that short rows fill the end. The heads
        # of a tile are neighbours: those of a cluster score the same blocks, others find them in L2.
        work = cute.arch.grid_dim()[0] - 1 - cute.arch.block_idx()[0]
        head = work % self.proxy_heads
        sequence = work // self.proxy_heads % batch
        tile = work // self.proxy_heads // batch
        tile_of_batch = sequence * cute.ceil_div(queries, BLOCK) + tile
        local, first = tile, Int32(0)
        if q_block.shape[0] > 0:
            local = q_block[tile]
        if doc_start_block.shape[0] > 0:
            first = doc_start_block[tile_of_batch]
        count = local - first  # blocks to score
        pairs = (count + 1) // 2

        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                q_tile = cute.local_tile(q_tiles[None, None, head], (BLOCK, BLOCK), (tile_of_batch, 0))
                k_blocks = cute.local_tile(k_tiles, (BLOCK, BLOCK), (None, 0))
                one_cta = cute.make_layout(1)
                load_q, _, _ = copy_utils.tma_get_copy_fn(
                    q_atom, 0, one_cta, q_tile, shared_q, single_stage=True
                )
                if const_expr(self.cluster > 1):
                    load_k, _, _ = copy_utils.tma_get_copy_fn(
                        k_atom,
                        cute.arch.block_idx_in_cluster(),
                        cute.make_layout(self.cluster),
                        k_blocks,
                        shared_k,
                        mcast_mask=cutlass.Int16((1 << self.cluster) - 1),
                    )
                else:
                    load_k, _, _ = copy_utils.tma_get_copy_fn(k_atom, 0, one_cta, k_blocks, shared_k)
                q_state = device.producer_state(1)
                q_pipeline.producer_acquire(q_state)
                load_q(tma_bar_ptr=q_pipeline.producer_get_barrier(q_state))
                k_state = device.producer_state(STAGES)
                begin = sequence * key_blocks + first
                for n in cutlass.range(2 * pairs, unroll=1):
                    k_pipeline.producer_acquire(k_state)
                    # An odd count repeats its last block, which the consumers then leave out.
                    block = begin + cutlass.min(n, count - 1)
                    load_k(block, k_state.index, tma_bar_ptr=k_pipeline.producer_get_barrier(k_state))
                    k_state.advance()
        else:
            cute.arch.setmaxregister_increase(240)
            thread = cute.arch.thread_idx()[0] - 128
            warpgroup_thread = cute.arch.make_warp_uniform(thread // 128) * 128
            slice_mma = mma.get_slice(warpgroup_thread)
            even, fragment_q, fragment_k = sm90_utils.partition_fragment_ABC(
                slice_mma, (BLOCK, BLOCK, BLOCK), None, shared_k
            )  # even, odd: the accumulators of a pair
            odd = cute.make_rmem_tensor(mma.partition_shape_C((BLOCK, BLOCK)), Float32)
            row_of_quad = thread % 2  # which of the quad's two rows this lane ranks
            half = thread % 4 // 2  # and which block of each pair

            keys = cute.make_rmem_tensor(self.slots - 1, Int32)  # descending
            keys.fill(Int32(EMPTY))
            blocks = cute.make_rmem_tensor(self.slots - 1, Int32)
            blocks.fill(Int32(-1))
            maxima = cute.make_rmem_tensor(2, Float32)  # of each block of the pair, over half a row
            score = Float32(-math.inf)

            q_pipeline.consumer_wait(device.consumer_state(1))
            ldmatrix = cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(False, 4), BFloat16)
            ldmatrix = cute.make_tiled_copy_A(ldmatrix, mma).get_slice(thread)
            cute.copy(ldmatrix, ldmatrix.partition_S(shared_q), ldmatrix.retile(fragment_q))
            state = device.consumer_state(STAGES)
            for pair in cutlass.range(pairs, unroll=1):
                k_pipeline.consumer_wait(state)
                even_state = state.clone()
                sm90_utils.gemm(
                    mma,
                    even,
                    fragment_q,
                    fragment_k[None, None, None, state.index],
                    zero_init=True,
                    wg_wait=-1,
                )
                state.advance()
                k_pipeline.consumer_wait(state)
                sm90_utils.gemm(
                    mma,
                    odd,
                    fragment_q,
                    fragment_k[None, None, None, state.index],
                    zero_init=True,
                    wg_wait=-1,
                )
                warpgroup.wait_group(1)
                k_pipeline.consumer_release(even_state)
                maxima[0] = self.half_row_max(even, row_of_quad)
                # Ranking the pair before here fills the time of the odd product. Branches, here and in the
                # maximum, keep the compiler from moving the maximum behind the wait below.
                self.rank(score, 2 * pair - 2 + half, first, count, keys, blocks)
                warpgroup.wait_group(0)
                k_pipeline.consumer_release(state)
                state.advance()
                maxima[1] = self.half_row_max(odd, row_of_quad)
                score = self.exchange(maxima, half, 2, cute.arch.fmax)
            self.rank(score, 2 * pairs - 2 + half, first, count, keys, blocks)

            row = tile * BLOCK + thread // 32 * 16 + thread % 32 // 4 + 8 * row_of_quad
            self.merge_and_store(
                keys, blocks, local, row, sequence * queries, queries, head, half, block_indices
            )
        if const_expr(self.cluster > 1):
            # The other CTA's releases still arrive in this one's shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def half_row_max(self, scores: cute.Tensor, row_of_quad: Int32):
        """The maximum of this lane's row over its own and its neighbour's columns, NaN left out.

        As ints: floats are ordered as their bits where one is not negative, and the other way round where all
        are. A positive NaN is above infinity. A negative one is picked only where there is nothing else, and
        `rank` makes it -inf.
        """
        best = self.half_row_extreme(scores, row_of_quad, cutlass.max, device.bits_of)
        if cute.arch.vote_any_sync(best < 0):
            least = self.half_row_extreme(scores, row_of_quad, cutlass.min, device.bits_of)
            best = least if best < 0 else best
        result = device.float_of(best)
        if cute.arch.vote_any_sync(best > INFINITY_BITS):
            result = self.half_row_extreme(scores, row_of_quad, cute.arch.fmax, Float32)  # drops NaN
        return result

    @cute.jit
    def half_row_extreme(
        self, scores: cute.Tensor, row_of_quad: Int32, pick: cutlass.Constexpr, read: cutlass.Constexpr
    ):
        by_row = layout_utils.reshape_acc_to_mn(scores)  # (2 rows, 32 columns)
        extremes = []
        for row in cutlass.range_constexpr(2):
            left, right = read(by_row[row, 0]), read(by_row[row, 1])  # two chains a row, for latency
            for column in cutlass.range_constexpr(2, 30, 4):
                left = pick(pick(left, read(by_row[row, column])), read(by_row[row, column + 1]))
                right = pick(pick(right, read(by_row[row, column + 2])), read(by_row[row, column + 3]))
            last = pick(read(by_row[row, 30]), read(by_row[row, 31]))
            extremes.append(pick(pick(left, right), last))
        return self.exchange(extremes, row_of_quad, 1, pick)

    @cute.jit
    def exchange(self, best, kept: Int32, distance: cutlass.Constexpr, pick: cutlass.Constexpr):
        """Two values in each of two lanes become one a lane: it keeps number `kept`, and sends the other."""
        mine = best[0] if kept == 0 else best[1]
        other = best[1] if kept == 0 else best[0]
        return pick(mine, cute.arch.shuffle_sync_bfly(other, offset=distance))

    @cute.jit
    def rank(
        self,
        score: Float32,
        offset: Int32,
        first: Int32,
        count: Int32,
        keys: cute.Tensor,
        blocks: cute.Tensor,
    ):
        """Puts the score of block first + offset in this lane's list."""
        bits = device.bits_of(cute.arch.fmax(score, Float32(-math.inf)))  # NaN alone becomes -inf
        # The order of fp32 as that of an int: sign and magnitude to two's complement. -0 becomes 0.
        sign = bits >> 31
        key = (bits ^ (sign & Int32(0x7FFFFFFF))) - sign
        block = first + offset

        # Out of range are the pair before the first and the repeated block of an odd count. A lane meets its
        # blocks in ascending order: strict comparisons leave equal scores to the lower block.
        last = self.slots - 2
        if (offset >= 0) & (offset < count) & (key > keys[last]):
            beats = key > keys[last]
            for i in cutlass.range_constexpr(last):
                j = last - i
                beats_next = key > keys[j - 1]
                pushed_key = keys[j - 1] if beats_next else key
                pushed_block = blocks[j - 1] if beats_next else block
                keys[j] = pushed_key if beats else keys[j]
                blocks[j] = pushed_block if beats else blocks[j]
                beats = beats_next
            keys[0] = key if beats else keys[0]
            blocks[0] = block if beats else blocks[0]

    @cute.jit
    def merge_and_store(
        self,
        keys: cute.Tensor,
        blocks: cute.Tensor,
        local: Int32,
        row: Int32,
        first_row: Int32,
        queries: Int32,
        head: Int32,
        half: Int32,
        block_indices: cute.Tensor,
    ):
        """Merges the two lists of a row (lanes c and c ^ 2) and writes it, half of it by each lane.

        One list against the other reversed: the better of each couple are the best of both, in bitonic
        order, which log2 exchanges sort. Both lanes end with the same list.
        """
        listed = self.slots - 1
        padded = 1 << (listed - 1).bit_length()
        best_keys = cute.make_rmem_tensor(padded, Int32)
        best_blocks = cute.make_rmem_tensor(padded, Int32)
        best_keys.fill(Int32(EMPTY))
        best_blocks.fill(Int32(-1))
        for j in cutlass.range_constexpr(listed):
            best_keys[j] = keys[j]
            best_blocks[j] = blocks[j]
        for j in cutlass.range_constexpr(listed):
            place = padded - 1 - j
            other_key = cute.arch.shuffle_sync_bfly(keys[j], offset=2)
            other_block = cute.arch.shuffle_sync_bfly(blocks[j], offset=2)
            better = self.precedes(other_key, other_block, best_keys[place], best_blocks[place])
            best_keys[place] = other_key if better else best_keys[place]
            best_blocks[place] = other_block if better else best_blocks[place]
        for stage in cutlass.range_constexpr(padded.bit_length() - 1):
            stride = padded >> (stage + 1)
            for j in cutlass.range_constexpr(padded):
                if const_expr(j & stride == 0):
                    low_key, low_block = best_keys[j], best_blocks[j]
                    high_key, high_block = best_keys[j + stride], best_blocks[j + stride]
                    swap = self.precedes(high_key, high_block, low_key, low_block)
                    best_keys[j] = high_key if swap else low_key
                    best_blocks[j] = high_block if swap else low_block
                    best_keys[j + stride] = low_key if swap else high_key
                    best_blocks[j + stride] = low_block if swap else high_block

        entries = cute.make_rmem_tensor(self.slots, Int32)
        entries[0] = local
        for j in cutlass.range_constexpr(listed):
            entries[j + 1] = best_blocks[j]
        width = math.gcd(self.slots, 4)  # neighbours that one store takes, aligned
        if row < queries:
            offset = (Int64(first_row + row) * self.proxy_heads + head) * self.slots
            for parity in cutlass.range_constexpr(2):
                if half == parity:
                    for v in cutlass.range_constexpr(parity, self.slots // width, 2):
                        pointer = device.global_pointer(
                            block_indices, offset + v * width, Int32, align=4 * width
                        )
                        vector = cute.make_rmem_tensor(width, Int32)
                        for i in cutlass.range_constexpr(width):
                            vector[i] = entries[v * width + i]
                        cute.autovec_copy(vector, cute.make_tensor(pointer, cute.make_layout(width)))

    @cute.jit
    def precedes(self, key: Int32, block: Int32, other_key: Int32, other_block: Int32):
        return (key > other_key) | ((key == other_key) & (block < other_block))


def select_blocks(
    q_proxy: torch.Tensor,
    k_proxy: torch.Tensor,
    q_block: torch.Tensor | None,
    doc_start_block: torch.Tensor | None,
    slots: int,
) -> torch.Tensor:
    """The local block and the best earlier blocks of its document for each query and proxy head.

    q_proxy (B, S, Hp, 128) and k_proxy (B, Sk, 1, 128) bf16, q_block (ceil(S / 128),) and doc_start_block
    (B, ceil(S / 128)) int32, all contiguous; S and Sk are multiples of 128 if B > 1. Returns block_indices
    (B, S, Hp, slots) int32: the local block, then by descending score, -1 where blocks run out.
    """
    place, dtype, heads = q_proxy.device, torch.int32, q_proxy.shape[2]
    block_indices = torch.empty(*q_proxy.shape[:3], slots, dtype=dtype, device=place)
    jit.load(Select(heads, slots))(
        q_proxy,
        k_proxy,
        nothing(place, dtype) if q_block is None else q_block,
        nothing(place, dtype, 1) if doc_start_block is None else doc_start_block,
        block_indices,
    )
    return block_indices
