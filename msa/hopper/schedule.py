"""Turns a selection around: for each (proxy head, key block) the (query, slot) entries that chose it.

    schedule = make_schedule(block_indices, first_row, n_rows, seq_len, key_blocks, cap)

A counting sort on the GPU, of a chunk of queries: whole sequences, or a part of one. Every sequence of the
chunk has key blocks of its own; they are numbered through, and a bucket is proxy_head * n_blocks + block.
A bucket's list holds its local entries first (the queries that lie in the block: only they need a causal
mask), then the others, both by row. Nothing depends on the order of atomics, so equal selections give equal
bits. All sizes are upper bounds that the host knows: no synchronisation.

Where a list goes is known once all of it is counted, hence three launches: count per tile of rows; prefix
over the tiles of a block and, in the CTA that ends last, over the buckets (and the work items); scatter and,
in the CTA that ends last, the order in which the items are worked on. The multiprocessors walk the lists of
their items side by side, so items that begin at about the same query and share a head stand together: what
one reads from memory, the others find in L2.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr
from cutlass.memory import SmemAllocator
from quack.utils import warp_prefix_sum
from torch import Tensor

from msa.hopper import device, jit
from msa.hopper.device import BLOCK, ITEM_FIELDS, LIST_ALIGN, QUERY_BITS, QUERY_MASK

TILE = 1024  # rows that one CTA counts and scatters
ROUND = 32  # rows that are scattered at once: the bits of a mask
WINDOW = 8192  # key blocks in shared memory at a time: those of 2^20 keys
PART_ALIGN = 64  # where a long list may be cut
MAX_CAP = 16384
ORDER_KEYS = 4096  # (window of queries, head): what items are ordered by

COUNT_THREADS = 512
SCAN_THREADS = 512
IN_FLIGHT = 8  # global loads a thread has under way when it counts
SCAN_IN_FLIGHT = 16  # and when it scans
ARRANGE_IN_FLIGHT = 4  # and, of items, when it orders those

# A tile's count of a block: entries of slots 1.. in the low half (at most TILE), local ones in the high half
# (at most BLOCK: the rows whose own block it is are one aligned group of BLOCK rows).
LOCAL_SHIFT = 16
LOCAL_ONE = 1 << LOCAL_SHIFT


class Schedule(NamedTuple):
    entries: Tensor  # (capacity,) int32: row in the chunk | slot << QUERY_BITS; nothing between the lists
    items: Tensor  # (max_items, 8) int32: start, count, key block, head << 16 | local entries, number, zeros
    bucket_items: Tensor  # (Hp * n_blocks + 1,) int32: number of each bucket's first item, and of all items
    first_block: int  # the chunk's first key block, counted over the batch
    n_blocks: int  # key blocks of the chunk's sequences


class Chunk(NamedTuple):
    """What the host knows of a chunk."""

    row_offset: int  # place of the chunk's first row in its sequence
    tiles: int
    first_block: int
    n_blocks: int
    columns: int  # key blocks that one tile of rows can meet
    capacity: int  # of entries
    max_items: int
    scratch: int  # int32s: items by number, 3 a bucket, CTAs that are done, counts (Hp, tiles, columns)

    @staticmethod
    def of(
        rows: int,
        proxy_heads: int,
        slots: int,
        first_row: int,
        n_rows: int,
        seq_len: int,
        key_blocks: int,
        cap: int,
    ) -> "Chunk":
        row_offset, last_row = first_row % seq_len, first_row + n_rows
        sequences = (row_offset + n_rows - 1) // seq_len + 1
        if first_row % BLOCK or not 0 < n_rows <= 1 << QUERY_BITS or first_row < 0 or last_row > rows:
            raise ValueError(f"chunk of {n_rows} rows from {first_row} of {rows}: not aligned, or outside")
        if rows % seq_len or (seq_len % BLOCK and rows != seq_len):
            raise ValueError(f"seq_len {seq_len}: {rows} rows need sequences of a multiple of {BLOCK}")
        if sequences > 1 and (row_offset or n_rows % seq_len):
            raise ValueError(f"chunk of {n_rows} rows from {first_row}: neither whole sequences nor in one")
        if cap % BLOCK or not 0 < cap <= MAX_CAP:
            raise ValueError(f"cap is {cap}; allowed are multiples of {BLOCK} up to {MAX_CAP}")
        if not 0 < slots <= 32 or proxy_heads >= 1 << 15:
            raise ValueError(f"block_indices: {slots} slots and {proxy_heads} heads; at most 32 and 32767")
        tiles = -(-n_rows // TILE)
        n_blocks = sequences * key_blocks
        columns = min(sequences, TILE // seq_len + 2) * key_blocks
        total = n_rows * proxy_heads * slots
        buckets = proxy_heads * n_blocks
        chunk = Chunk(
            row_offset=row_offset,
            tiles=tiles,
            first_block=first_row // seq_len * key_blocks,
            n_blocks=n_blocks,
            columns=columns,
            capacity=total + LIST_ALIGN * buckets,
            # A list of c > 0 entries makes ceil(c / cap) = 1 + floor((c - 1) / cap) items, so all of them
            # together at most one a bucket, and floor(total / cap) more.
            max_items=buckets + total // cap,
            scratch=4 * (buckets + total // cap) + 3 * buckets + 2 + proxy_heads * tiles * columns,
        )
        if max(chunk.capacity, proxy_heads * tiles * columns) >= 2**31:
            raise ValueError(f"chunk of {n_rows} rows: its lists pass 2^31 entries, take fewer rows")
        return chunk


@dataclass(unsafe_hash=True)
class BuildSchedule:
    proxy_heads: int
    slots: int

    def __post_init__(self):
        # A thread a (row of the round, slot); more where few slots would leave a window to a warp or two.
        self.scatter_threads = max(256, ROUND * self.slots)

    def arguments(self):
        return (
            jit.tensor("i32", self.proxy_heads, self.slots),  # block_indices of the chunk
            jit.tensor("i32"),  # entries
            jit.tensor("i32", ITEM_FIELDS),  # items
            jit.tensor("i32"),  # bucket_items
            jit.tensor("i32"),  # scratch, of Chunk.scratch
            Int32(1),  # n_rows
            Int32(0),  # row_offset
            Int32(1),  # seq_len
            Int32(1),  # key_blocks
            Int32(0),  # first_block
            Int32(1),  # n_blocks
            Int32(1),  # columns
            Int32(1),  # cap
        )

    @cute.jit
    def __call__(
        self,
        block_indices: cute.Tensor,
        entries: cute.Tensor,
        items: cute.Tensor,
        bucket_items: cute.Tensor,
        scratch: cute.Tensor,
        n_rows: Int32,
        row_offset: Int32,
        seq_len: Int32,
        key_blocks: Int32,
        first_block: Int32,
        n_blocks: Int32,
        columns: Int32,
        cap: Int32,
        stream,
    ):
        tiles = cute.ceil_div(n_rows, TILE)
        # One buffer: an allocation costs the host as much as a launch. Items first: they are read by fours.
        buckets = self.proxy_heads * n_blocks
        n_items = items.shape[0]
        pieces = []
        numbered_items = cute.make_tensor(scratch.iterator, cute.make_layout((n_items, 4), stride=(4, 1)))
        begin = n_items * 4
        for size in (buckets, buckets, buckets, 2, self.proxy_heads * tiles * columns):
            pieces.append(cute.make_tensor(scratch.iterator + begin, cute.make_layout(size)))
            begin = begin + size
        local_counts, other_counts, other_starts, done, counts = pieces
        self.count(block_indices, counts, done, n_rows, row_offset, seq_len, key_blocks, columns).launch(
            grid=[tiles, self.proxy_heads, 1], block=[COUNT_THREADS, 1, 1], stream=stream
        )
        self.scan(
            counts,
            local_counts,
            other_counts,
            other_starts,
            numbered_items,
            bucket_items,
            done,
            n_rows,
            row_offset,
            seq_len,
            key_blocks,
            first_block,
            n_blocks,
            columns,
            cap,
        ).launch(
            grid=[cute.ceil_div(n_blocks, SCAN_THREADS), self.proxy_heads, 1],
            block=[SCAN_THREADS, 1, 1],
            stream=stream,
        )
        self.scatter(
            block_indices,
            counts,
            local_counts,
            other_starts,
            entries,
            numbered_items,
            bucket_items,
            items,
            done,
            n_rows,
            row_offset,
            seq_len,
            key_blocks,
            n_blocks,
            columns,
        ).launch(grid=[tiles, self.proxy_heads, 1], block=[self.scatter_threads, 1, 1], stream=stream)

    @cute.jit
    def extent(self, tile: Int32, n_rows: Int32, row_offset: Int32, seq_len: Int32, key_blocks: Int32):
        """A tile's rows, its first sequence, and the key blocks of its sequences: its columns."""
        rows = cutlass.min(Int32(TILE), n_rows - tile * TILE)
        first = row_offset + tile * TILE
        first_seq = first // seq_len
        last_seq = (first + rows - 1) // seq_len
        return rows, first_seq, (last_seq - first_seq + 1) * key_blocks

    # ---- 1: how often the rows of a tile choose each block ---------------------------------------------

    @cute.kernel
    def count(
        self,
        block_indices: cute.Tensor,
        counts: cute.Tensor,
        done: cute.Tensor,
        n_rows: Int32,
        row_offset: Int32,
        seq_len: Int32,
        key_blocks: Int32,
        columns: Int32,
    ):
        tile, head, _ = cute.arch.block_idx()
        tiles, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        if tile == 0 and head == 0 and thread < 2:
            done[thread] = Int32(0)  # for the launches behind this one
        histogram = SmemAllocator().allocate_tensor(Int32, cute.make_layout(WINDOW), byte_alignment=16)
        rows, first_seq, tile_columns = self.extent(tile, n_rows, row_offset, seq_len, key_blocks)
        first_row = tile * TILE
        counts_base = (head * tiles + tile) * columns

        for window in cutlass.range(0, tile_columns, WINDOW, unroll=1):
            width = cutlass.min(Int32(WINDOW), tile_columns - window)
            for column in cutlass.range(thread, width, COUNT_THREADS, unroll=1):
                histogram[column] = Int32(0)
            cute.arch.sync_threads()
            for batch in cutlass.range(0, rows * self.slots, COUNT_THREADS * IN_FLIGHT, unroll=1):
                indices = cute.make_rmem_tensor(IN_FLIGHT, Int32)
                for j in cutlass.range_constexpr(IN_FLIGHT):
                    choice = batch + j * COUNT_THREADS + thread
                    row = cutlass.min(choice // self.slots, rows - 1)
                    indices[j] = block_indices[first_row + row, head, choice % self.slots]
                for j in cutlass.range_constexpr(IN_FLIGHT):
                    choice = batch + j * COUNT_THREADS + thread
                    row = choice // self.slots
                    if row < rows and indices[j] >= 0:
                        seq = (row_offset + first_row + row) // seq_len
                        here = (seq - first_seq) * key_blocks + indices[j] - window
                        if here >= 0 and here < width:
                            one = Int32(1)
                            if choice % self.slots == 0:
                                one = Int32(LOCAL_ONE)
                            cute.arch.atomic_add(histogram.iterator + here, one)
            cute.arch.sync_threads()
            for column in cutlass.range(thread, width, COUNT_THREADS, unroll=1):
                counts[counts_base + window + column] = histogram[column]
            cute.arch.sync_threads()

    # ---- 2: counts -> for each (tile, block) the entries of earlier tiles, and then where lists start --

    @cute.kernel
    def scan(
        self,
        counts: cute.Tensor,
        local_counts: cute.Tensor,
        other_counts: cute.Tensor,
        other_starts: cute.Tensor,
        items: cute.Tensor,
        bucket_items: cute.Tensor,
        done: cute.Tensor,
        n_rows: Int32,
        row_offset: Int32,
        seq_len: Int32,
        key_blocks: Int32,
        first_block: Int32,
        n_blocks: Int32,
        columns: Int32,
        cap: Int32,
    ):
        shared = SmemAllocator()
        rooms = shared.allocate_tensor(Int32, cute.make_layout(SCAN_THREADS // 32), byte_alignment=16)
        parts = shared.allocate_tensor(Int32, cute.make_layout(SCAN_THREADS // 32), byte_alignment=16)
        self.scan_tiles(
            counts, local_counts, other_counts, n_rows, row_offset, seq_len, key_blocks, n_blocks, columns
        )
        if device.is_last_cta(done.iterator, rooms):
            self.scan_buckets(
                local_counts, other_counts, other_starts, items, bucket_items, first_block, n_blocks, cap,
                rooms, parts,
            )  # fmt: skip

    @cute.jit
    def scan_tiles(
        self,
        counts: cute.Tensor,
        local_counts: cute.Tensor,
        other_counts: cute.Tensor,
        n_rows: Int32,
        row_offset: Int32,
        seq_len: Int32,
        key_blocks: Int32,
        n_blocks: Int32,
        columns: Int32,
    ):
        group, head, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        block = group * SCAN_THREADS + thread
        tiles = cute.ceil_div(n_rows, TILE)
        if block < n_blocks:
            # Only the tiles that hold rows of the block's own sequence have a column for it. Its number is
            # that within the sequence, but in the first of them, which may begin in an earlier sequence.
            seq = block // key_blocks
            first_tile = cutlass.max(seq * seq_len - row_offset, Int32(0)) // TILE
            last_tile = (cutlass.min((seq + 1) * seq_len - row_offset, n_rows) - 1) // TILE
            earlier = (seq - (row_offset + first_tile * TILE) // seq_len) * key_blocks
            base = head * tiles * columns + block - seq * key_blocks
            others = Int32(0)
            local = Int32(0)
            for batch in cutlass.range(first_tile, last_tile + 1, SCAN_IN_FLIGHT, unroll=1):
                loaded = cute.make_rmem_tensor(SCAN_IN_FLIGHT, Int32)
                for j in cutlass.range_constexpr(SCAN_IN_FLIGHT):
                    tile = cutlass.min(batch + j, last_tile)
                    place = base + tile * columns
                    if tile == first_tile:
                        place += earlier
                    loaded[j] = counts[place]
                for j in cutlass.range_constexpr(SCAN_IN_FLIGHT):
                    tile = batch + j
                    if tile <= last_tile:
                        place = base + tile * columns
                        if tile == first_tile:
                            place += earlier
                        counts[place] = others
                        others += loaded[j] & (LOCAL_ONE - 1)
                        local += loaded[j] >> LOCAL_SHIFT
            local_counts[head * n_blocks + block] = local
            other_counts[head * n_blocks + block] = others

    @cute.jit
    def list_size(self, count: Int32, cap: Int32):
        """The room that a list takes, and its parts."""
        room = (count + (LIST_ALIGN - 1)) // LIST_ALIGN * LIST_ALIGN
        return room, (count + cap - 1) // cap

    @cute.jit
    def scan_buckets(
        self,
        local_counts: cute.Tensor,
        other_counts: cute.Tensor,
        other_starts: cute.Tensor,
        items: cute.Tensor,
        bucket_items: cute.Tensor,
        first_block: Int32,
        n_blocks: Int32,
        cap: Int32,
        warp_rooms: cute.Tensor,
        warp_parts: cute.Tensor,
    ):
        """Where each list starts, and the work items: a thread a bucket, SCAN_THREADS at a time."""
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % 32, thread // 32
        buckets = self.proxy_heads * n_blocks
        start = Int32(0)  # of the first of them
        item = Int32(0)
        last = buckets - 1
        n_local = local_counts[cutlass.min(thread, last)]
        n_others = other_counts[cutlass.min(thread, last)]
        for first in cutlass.range(0, buckets, SCAN_THREADS, unroll=1):
            bucket = first + thread
            # The next ones' counts are under way while these go through their barriers.
            following = cutlass.min(bucket + SCAN_THREADS, last)
            next_local, next_others = local_counts[following], other_counts[following]
            count = n_local + n_others
            if bucket > last:
                count = Int32(0)
            list_room, list_parts = self.list_size(count, cap)
            rooms_through = warp_prefix_sum(list_room, lane)
            parts_through = warp_prefix_sum(list_parts, lane)
            if lane == 31:
                warp_rooms[warp] = rooms_through
                warp_parts[warp] = parts_through
            cute.arch.sync_threads()
            rooms = Int32(0)
            parts = Int32(0)
            if lane < SCAN_THREADS // 32:
                rooms = warp_rooms[lane]
                parts = warp_parts[lane]
            earlier_rooms = rooms if lane < warp else Int32(0)
            earlier_parts = parts if lane < warp else Int32(0)
            my_start = start + cute.arch.warp_redux_sync(earlier_rooms, "add") + rooms_through - list_room
            my_item = item + cute.arch.warp_redux_sync(earlier_parts, "add") + parts_through - list_parts
            start += cute.arch.warp_redux_sync(rooms, "add")
            item += cute.arch.warp_redux_sync(parts, "add")
            if bucket <= last:
                other_starts[bucket] = my_start + n_local
                bucket_items[bucket] = my_item
                head = bucket // n_blocks
                key_block = first_block + bucket - head * n_blocks
                # No part is empty: count > (parts - 1) * cap, and a part is at most cap. Where there are
                # several, one has at least 128 entries (count / parts > cap / 2 >= 64, rounded up to 64), so
                # that all local entries lie in the first.
                even = (count + list_parts - 1) // cutlass.max(list_parts, Int32(1))
                length = (even + (PART_ALIGN - 1)) // PART_ALIGN * PART_ALIGN
                for part in cutlass.range(list_parts, unroll=1):
                    fields = cute.make_rmem_tensor(4, Int32)
                    fields[0] = my_start + part * length
                    fields[1] = cutlass.min(length, count - part * length)
                    fields[2] = key_block
                    fields[3] = head << 16
                    if part == 0:
                        fields[3] = head << 16 | n_local
                    target = device.global_pointer(items, (my_item + part) * 4, Int32)
                    cute.autovec_copy(fields, cute.make_tensor(target, cute.make_layout(4)))
            n_local, n_others = next_local, next_others
            cute.arch.sync_threads()  # all have read what the next warps write
        if thread == 0:
            bucket_items[buckets] = item

    # ---- 3: every entry to its place, and then the order of the items ----------------------------------

    @cute.kernel
    def scatter(
        self,
        block_indices: cute.Tensor,
        counts: cute.Tensor,
        local_counts: cute.Tensor,
        other_starts: cute.Tensor,
        entries: cute.Tensor,
        numbered_items: cute.Tensor,
        bucket_items: cute.Tensor,
        items: cute.Tensor,
        done: cute.Tensor,
        n_rows: Int32,
        row_offset: Int32,
        seq_len: Int32,
        key_blocks: Int32,
        n_blocks: Int32,
        columns: Int32,
    ):
        shared = SmemAllocator()
        chosen_by = shared.allocate_tensor(Int32, cute.make_layout(WINDOW), byte_alignment=16)
        next_place = shared.allocate_tensor(Int32, cute.make_layout(WINDOW), byte_alignment=16)
        tile, head, _ = cute.arch.block_idx()
        tiles, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        rows, first_seq, tile_columns = self.extent(tile, n_rows, row_offset, seq_len, key_blocks)
        first_row = tile * TILE
        first_bucket = head * n_blocks + first_seq * key_blocks

        # Local entries: one aligned group of rows a block, padding only behind it.
        for row in cutlass.range(thread, rows, self.scatter_threads, unroll=1):
            index = block_indices[first_row + row, head, 0]
            if index >= 0:
                seq = (row_offset + first_row + row) // seq_len
                bucket = first_bucket + (seq - first_seq) * key_blocks + index
                start = other_starts[bucket] - local_counts[bucket]
                entries[start + row % BLOCK] = first_row + row

        if const_expr(self.slots > 1):
            counts_base = (head * tiles + tile) * columns
            self.scatter_others(
                block_indices,
                counts,
                other_starts,
                entries,
                chosen_by,
                next_place,
                thread,
                head,
                first_row,
                rows,
                first_seq,
                tile_columns,
                first_bucket,
                counts_base,
                row_offset,
                seq_len,
                key_blocks,
            )
        if device.is_last_cta(done.iterator + 1, next_place):
            self.arrange(entries, numbered_items, bucket_items, items, n_rows, chosen_by, next_place)

    @cute.jit
    def scatter_others(
        self,
        block_indices: cute.Tensor,
        counts: cute.Tensor,
        other_starts: cute.Tensor,
        entries: cute.Tensor,
        chosen_by: cute.Tensor,
        next_place: cute.Tensor,
        thread: Int32,
        head: Int32,
        first_row: Int32,
        rows: Int32,
        first_seq: Int32,
        tile_columns: Int32,
        first_bucket: Int32,
        counts_base: Int32,
        row_offset: Int32,
        seq_len: Int32,
        key_blocks: Int32,
    ):
        """Slots 1.., ROUND rows at a time. A row's blocks are distinct, so that in a block's mask a bit is a
        row, and the bits below a row's own are the entries of this round before it."""
        slot = thread % self.slots
        bit = thread // self.slots % ROUND
        takes_part = slot > 0
        if const_expr(self.scatter_threads > ROUND * self.slots):
            takes_part = slot > 0 and thread < ROUND * self.slots

        for window in cutlass.range(0, tile_columns, WINDOW, unroll=1):
            width = cutlass.min(Int32(WINDOW), tile_columns - window)
            for column in cutlass.range(thread, width, self.scatter_threads, unroll=1):
                chosen_by[column] = Int32(0)
                earlier = counts[counts_base + window + column]
                next_place[column] = other_starts[first_bucket + window + column] + earlier
            index = block_indices[first_row + cutlass.min(bit, rows - 1), head, slot]
            cute.arch.sync_threads()
            for round in cutlass.range(0, rows, ROUND, unroll=1):
                row = round + bit
                # The next round's choice is under way while this one's goes through its barriers.
                following = block_indices[first_row + cutlass.min(row + ROUND, rows - 1), head, slot]
                here = Int32(-1)
                if takes_part and row < rows and index >= 0:
                    seq = (row_offset + first_row + row) // seq_len
                    here = (seq - first_seq) * key_blocks + index - window
                    if here >= width:
                        here = Int32(-1)
                if here >= 0:
                    cute.arch.atomic_or(chosen_by.iterator + here, Int32(1) << bit)
                cute.arch.sync_threads()
                mask = Int32(0)
                place = Int32(0)
                if here >= 0:
                    mask = chosen_by[here]
                    place = next_place[here]
                    rank = cute.arch.popc(mask & ((Int32(1) << bit) - 1))
                    entries[place + rank] = (first_row + row) | (slot << QUERY_BITS)
                cute.arch.sync_threads()
                # All have read; the last row of each block (no bit above its own) moves the block on.
                if here >= 0 and (mask & (Int32(-2) << bit)) == 0:
                    next_place[here] = place + cute.arch.popc(mask)
                    chosen_by[here] = Int32(0)
                cute.arch.sync_threads()
                index = following

    @cute.jit
    def arrange(
        self,
        entries: cute.Tensor,
        numbered_items: cute.Tensor,
        bucket_items: cute.Tensor,
        items: cute.Tensor,
        n_rows: Int32,
        places: cute.Tensor,
        warp_sums: cute.Tensor,
    ):
        """A counting sort by (window of the first query, head). Atomics may change the order within a key,
        and so only when an item is worked on: what it writes goes by its number."""
        threads = self.scatter_threads
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % 32, thread // 32
        n_items = bucket_items[bucket_items.shape[0] - 1]
        window = cute.ceil_div(n_rows, ORDER_KEYS // self.proxy_heads)
        window = cute.ceil_div(window, TILE) * TILE
        for key in cutlass.range(thread, ORDER_KEYS, threads, unroll=1):
            places[key] = Int32(0)
        cute.arch.sync_threads()
        for batch in cutlass.range(0, n_items, threads * ARRANGE_IN_FLIGHT, unroll=1):
            _, keys = self.load_items(entries, numbered_items, batch + thread, n_items, window)
            for j in cutlass.range_constexpr(ARRANGE_IN_FLIGHT):
                if batch + j * threads + thread < n_items:
                    cute.arch.atomic_add(places.iterator + keys[j], Int32(1))
        cute.arch.sync_threads()
        # Counts to places: each thread a few neighbouring keys.
        share = -(-ORDER_KEYS // threads)
        counts = cute.make_rmem_tensor(share, Int32)
        total = Int32(0)
        for j in cutlass.range_constexpr(share):
            counts[j] = Int32(0)
            if thread * share + j < ORDER_KEYS:
                counts[j] = places[thread * share + j]
            total += counts[j]
        through = warp_prefix_sum(total, lane)
        if lane == 31:
            warp_sums[warp] = through
        cute.arch.sync_threads()
        earlier = Int32(0)
        if lane < warp:
            earlier = warp_sums[lane]
        place = cute.arch.warp_redux_sync(earlier, "add") + through - total
        for j in cutlass.range_constexpr(share):
            if thread * share + j < ORDER_KEYS:
                places[thread * share + j] = place
            place += counts[j]
        cute.arch.sync_threads()
        for batch in cutlass.range(0, n_items, threads * ARRANGE_IN_FLIGHT, unroll=1):
            loaded, keys = self.load_items(entries, numbered_items, batch + thread, n_items, window)
            for j in cutlass.range_constexpr(ARRANGE_IN_FLIGHT):
                item = batch + j * threads + thread
                if item < n_items:
                    position = cute.arch.atomic_add(places.iterator + keys[j], Int32(1))
                    fields = cute.make_rmem_tensor(ITEM_FIELDS, Int32)
                    fields.fill(0)  # device.TICKETS too
                    for i in cutlass.range_constexpr(4):
                        fields[i] = loaded[i, j]
                    fields[4] = item
                    target = device.global_pointer(items, position * ITEM_FIELDS, Int32)
                    cute.autovec_copy(fields, cute.make_tensor(target, cute.make_layout(ITEM_FIELDS)))

    @cute.jit
    def load_items(
        self,
        entries: cute.Tensor,
        numbered_items: cute.Tensor,
        first: Int32,
        n_items: Int32,
        window: Int32,
    ):
        """A thread's next items (4 fields, items), past the end the last, and what they are ordered by."""
        loaded = cute.make_rmem_tensor((4, ARRANGE_IN_FLIGHT), Int32)
        keys = cute.make_rmem_tensor(ARRANGE_IN_FLIGHT, Int32)
        for j in cutlass.range_constexpr(ARRANGE_IN_FLIGHT):
            item = cutlass.min(first + j * self.scatter_threads, n_items - 1)
            device.load_vector(device.global_pointer(numbered_items, item * 4, Int32), loaded[None, j])
        for j in cutlass.range_constexpr(ARRANGE_IN_FLIGHT):
            keys[j] = entries[loaded[0, j]] & Int32(QUERY_MASK)
        for j in cutlass.range_constexpr(ARRANGE_IN_FLIGHT):
            keys[j] = (keys[j] // window) * self.proxy_heads + (loaded[3, j] >> 16)
        return loaded, keys


def make_schedule(
    block_indices: Tensor, first_row: int, n_rows: int, seq_len: int, key_blocks: int, cap: int
) -> Schedule:
    """The schedule of rows [first_row, first_row + n_rows) of block_indices (B * S, Hp, slots) int32.

    Block numbers count within a row's sequence, -1 is none; slot 0 is the row's own block, -1 in padding,
    which only the end of a sequence may hold. seq_len = S, key_blocks = key blocks a sequence. Lists longer
    than cap are split evenly. The caller sees to contiguity and to what block_indices holds.
    """
    chunk = Chunk.of(*block_indices.shape, first_row, n_rows, seq_len, key_blocks, cap)
    _, proxy_heads, slots = block_indices.shape
    buckets = proxy_heads * chunk.n_blocks

    def empty(*shape: int) -> Tensor:
        return block_indices.new_empty(shape)

    schedule = Schedule(
        entries=empty(chunk.capacity),
        items=empty(chunk.max_items, ITEM_FIELDS),
        bucket_items=empty(buckets + 1),
        first_block=chunk.first_block,
        n_blocks=chunk.n_blocks,
    )
    jit.load(BuildSchedule(proxy_heads, slots))(
        block_indices[first_row : first_row + n_rows],
        schedule.entries,
        schedule.items,
        schedule.bucket_items,
        empty(chunk.scratch),
        n_rows,
        chunk.row_offset,
        seq_len,
        key_blocks,
        chunk.first_block,
        chunk.n_blocks,
        chunk.columns,
        cap,
    )
    return schedule


def schedule_reference(
    block_indices: Tensor, first_row: int, n_rows: int, seq_len: int, key_blocks: int, cap: int
) -> Schedule:
    """`make_schedule` in PyTorch, on any device, for tests; its items are in the order of their numbers.

    Where that leaves memory as it was (between the lists, and behind the last item), this has -1.
    """
    chunk = Chunk.of(*block_indices.shape, first_row, n_rows, seq_len, key_blocks, cap)
    proxy_heads, kind = block_indices.shape[1], {"dtype": torch.int32, "device": block_indices.device}
    buckets = proxy_heads * chunk.n_blocks
    indices = block_indices[first_row : first_row + n_rows].long()
    row, head, slot = (indices >= 0).nonzero(as_tuple=True)  # by row: a stable sort keeps that
    seq = (chunk.row_offset + row) // seq_len
    bucket = head * chunk.n_blocks + seq * key_blocks + indices[row, head, slot]
    order = (2 * bucket + (slot > 0)).sort(stable=True).indices
    row, slot, bucket = row[order], slot[order], bucket[order]

    n_local = bucket[slot == 0].bincount(minlength=buckets)
    count = bucket.bincount(minlength=buckets)
    room = (count + LIST_ALIGN - 1) // LIST_ALIGN * LIST_ALIGN
    start = room.cumsum(0) - room
    rank = torch.arange(len(bucket), device=bucket.device) - (count.cumsum(0) - count)[bucket]
    entries = torch.full((chunk.capacity,), -1, **kind)
    entries[start[bucket] + rank] = (row | slot << QUERY_BITS).int()

    parts = (count + cap - 1) // cap
    length = (count + parts - 1) // parts.clamp(min=1)
    length = (length + PART_ALIGN - 1) // PART_ALIGN * PART_ALIGN
    bucket_items = torch.zeros(buckets + 1, **kind)
    bucket_items[1:] = parts.cumsum(0)
    of = torch.arange(buckets, device=bucket.device).repeat_interleave(parts)  # each item's bucket
    part = torch.arange(len(of), device=bucket.device) - bucket_items[of]
    begin = part * length[of]
    head, block = of // chunk.n_blocks, of % chunk.n_blocks
    local = (n_local[of] - begin).clamp(min=0).minimum(length[of])
    items = torch.full((chunk.max_items, ITEM_FIELDS), -1, **kind)
    fields = (start[of] + begin, (count[of] - begin).minimum(length[of]), chunk.first_block + block)
    items[: len(of), :4] = torch.stack((*fields, head << 16 | local), 1).int()
    items[: len(of), 4] = torch.arange(len(of), **kind)
    items[: len(of), 5:] = 0
    return Schedule(entries, items, bucket_items, chunk.first_block, chunk.n_blocks)
