"""What the kernels share on the device: raw loads and stores, tiles gathered row by row, pipelines."""

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils.hopper_helpers import get_smem_layout_atom
from quack import copy_utils

BLOCK = 128  # keys in a block, and the head dimension
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

# A list entry is one (query, slot): the query, counted from the start of its chunk, in the low bits.
QUERY_BITS = 24
QUERY_MASK = (1 << QUERY_BITS) - 1
LIST_ALIGN = 16  # every list starts at a multiple: a tile of the teacher never straddles two lists

ITEM_FIELDS = 8  # of a work item: start, count, key block, proxy head << 16 | local entries, number
TICKETS = 5  # a field: in the first item it counts those that were handed out, once a schedule

CONSUMERS = 256  # two warpgroups multiply, the warps before them load


@dsl_user_op
def pack_bf16(low, high, *, loc=None, ip=None):
    """Two fp32 rounded to bf16 in one 32-bit register."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (low, high)]
    return Int32(
        llvm.inline_asm(
            T.i32(),
            operands,
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def bits_of(x, *, loc=None, ip=None):
    """The bits of an fp32 as an int."""
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def float_of(x, *, loc=None, ip=None):
    """The fp32 with these bits."""
    return Float32(llvm.bitcast(T.f32(), Int32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def low_bf16(pair):
    """The lower bf16 of a packed pair, as fp32."""
    return float_of(pair << 16)


def high_bf16(pair):
    return float_of(pair & Int32(-65536))


def global_pointer(tensor, offset, dtype, align=16):
    """A pointer `offset` elements into a tensor. Give an Int64: 32 bits end at 4 GiB of bf16."""
    address = (tensor.iterator + offset).toint()
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def shared_pointer(address, dtype, align=16):
    return cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=align)


def contiguous(pointer, length, *shape):
    """The tensor (length, *shape) at a pointer."""
    strides = [1]
    for n in reversed(shape):
        strides.insert(0, strides[0] * n)
    return cute.make_tensor(pointer, cute.make_layout((length, *shape), stride=tuple(strides)))


def flatten(x, *shape):
    """A contiguous tensor with all before `shape` as one dimension: (length, *shape)."""
    length = 1
    for n in x.shape[: len(x.shape) - len(shape)]:
        length = length * n
    return contiguous(x.iterator, length, *shape)


def load_vector(pointer, values):
    """Loads size(values) neighbours into a register tensor with one instruction where alignment allows."""
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(cute.size(values))), values)


@dsl_user_op
def add_vector(pointer, values, *, loc=None, ip=None):
    """Adds four fp32 to memory, atomically each. Nothing waits for it."""
    operands = [pointer.toint(loc=loc, ip=ip).ir_value()]
    operands += [Float32(x).ir_value(loc=loc, ip=ip) for x in values]
    llvm.inline_asm(
        None,
        operands,
        "red.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
        "l,f,f,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def bulk_load(destination, source, num_bytes, barrier):
    """An asynchronous copy of `num_bytes` (a multiple of 16) to shared memory that signals a barrier."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[Int32(destination), source.toint(), Int32(num_bytes), Int32(barrier)],
    )


def box_load(descriptor, destination, barrier, column, row):
    """One TMA box at (row, column) of a row-major matrix to a shared-memory address."""
    cute.arch.inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [{$r0}], [{$r1}, {{$r2}, {$r3}}], [{$r4}];",
        read_only_args=[Int32(destination), descriptor.toint(), Int32(column), Int32(row), Int32(barrier)],
    )


def async_load_16(destination, source):
    """cp.async of 16 bytes."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
        read_only_args=[Int32(destination), source.toint()],
    )


def swizzle_atom():
    """The 128-byte swizzled shared-memory layout of bf16 rows: 8 rows of 64 columns."""
    return warpgroup.make_smem_layout_atom(
        get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, BLOCK), BFloat16
    )


def rows_layout(rows, stages):
    """Shared memory for `stages` tiles of (rows, 128): the left 64 columns of all rows, then the right."""
    return cute.tile_to_shape(swizzle_atom(), (rows, BLOCK, stages), order=(0, 1, 2))


def row_box_atom(matrix, rows):
    """A TMA atom whose box is `rows` neighbouring rows of 64 columns; the swizzle follows the address."""
    box = cute.make_composed_layout(swizzle_atom().inner, 0, cute.make_layout((rows, 64), stride=(64, 1)))
    atom, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), matrix, box, (rows, 64))
    return atom


def tma_pipeline(barriers, stages, num_bytes, producers=1, cluster=1):
    """One barrier pair a stage: filled by TMA, emptied by eight consumer warps of each CTA of the cluster.

    In a cluster of several each CTA loads a part of a stage into all of them, once all have emptied it.
    """
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, producers),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, cluster * CONSUMERS // 32),
        tx_count=num_bytes,
        cta_layout_vmnk=cute.make_layout((1, 1, cluster, 1)),
    )


def producer_state(stages):
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages):
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


@cute.jit
def take_ticket(items: cute.Tensor, lane: Int32):
    """In lane 0 how many items were handed out before, beside the one that each CTA begins with.

    Items differ in size: a CTA that gets on takes more of them. What an item writes goes by its number, so
    that it doesn't matter who works on it. The schedule sets the count to 0: only one kernel may use it.
    """
    ticket = Int32(0)
    if lane == 0:
        ticket = cute.arch.atomic_add(items.iterator + TICKETS, Int32(1))
    return ticket


@cute.jit
def is_last_cta(done: cute.Pointer, slot: cute.Tensor):
    """Whether this CTA is the last of its launch to come here, and so sees what all of them wrote before.

    All threads call it. `done` counts, from 0; `slot` is an int of shared memory that nobody needs any more.
    """
    cute.arch.sync_threads()
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.fence_acq_rel_gpu()
        slot[0] = cute.arch.atomic_add(done, Int32(1))
        cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_threads()
    x, y, z = cute.arch.grid_dim()
    last = slot[0] == x * y * z - 1
    cute.arch.sync_threads()  # before the slot is written again
    return last


def padded_group(group):
    """Rows that a query's heads take in a tile: the group, rounded up to 4, 8 or 16."""
    return max(4, 1 << (group - 1).bit_length())


def edge_index(entry, head, proxy_heads, slots):
    """The place of an entry's slot among the chunk's: [query][proxy head][slot]."""
    return ((entry & Int32(QUERY_MASK)) * proxy_heads + head) * slots + (entry >> QUERY_BITS)


def store_slot(partial, edge, group, g, t, packed, first, count):
    """Stores `count` 16-byte pieces of a row, from piece `first`, in the layout that Combine reads."""
    offset = Int64(edge) * (group * BLOCK) + (g * 4 + t) * 8 + first * (32 * group)
    pointer = cute.recast_ptr(global_pointer(partial, offset, BFloat16), dtype=Int32)
    for j in range(count):
        # Streaming: nothing reads it again before it has left the L2 cache anyway.
        copy_utils.store_v4(
            pointer + j * (16 * group),
            packed[4 * j],
            packed[4 * j + 1],
            packed[4 * j + 2],
            packed[4 * j + 3],
            cop="cs",
        )


def fill_zero(address, num_bytes, threads):
    """All threads of the CTA clear a piece of shared memory that TMA or a product will read."""
    zero = cute.make_rmem_tensor(4, Int32)
    zero.fill(0)
    thread = cute.arch.thread_idx()[0]
    for i in range(num_bytes // (16 * threads)):
        target = shared_pointer(address + (i * threads + thread) * 16, Int32)
        cute.autovec_copy(zero, cute.make_tensor(target, cute.make_layout(4)))
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
