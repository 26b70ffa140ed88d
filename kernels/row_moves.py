"""What the kernels that fill and empty mailboxes share: finding a region, copying rows.

Rows are copied as they are, element by element, so that every bit arrives. Accesses are 16 bytes
wide where D x itemsize is a multiple of 16, else as wide as it allows: ``pointer_at`` says that a
region's parts start on multiples of 16 bytes, and D is a constant, so the compiler knows how the
start of each row is aligned.

Example: D = 2048 in bf16, rows of 4096 bytes: 128 threads copy one by two loads and two stores of
16 bytes each. D = 2052, rows of 4104 bytes: by stores of 8 bytes.
"""

from typing import NamedTuple

from torch import Tensor

from olmo_shard.kernels.language import tl, triton
from olmo_shard.kernels.regions import Regions, region_offset

BLOCK_BYTES = 8192
"""Of a row at a time: 64 bytes a thread, which leaves registers for many programs."""
VALUES_BLOCK = tl.constexpr(512)
"""Weights or numbers of experts at a time."""


class RowList(NamedTuple):
    """The rows that a rank sends (list S), ordered by destination, its own included."""

    counts_W: Tensor
    """int64 [W]: rows for each rank."""
    row_S: Tensor | None = None
    """int64 [>= S]: which row of the tokens each one is; null: row s is row s."""
    routes_W: Tensor | None = None
    """int64 [W]: routes to each rank's experts, for headers."""
    weights_Sm: Tensor | None = None
    """FP32 [>= S, m]: router weights."""
    local_expert_Sm: Tensor | None = None
    """int32 [>= S, m]: numbers of experts."""


def row_block(width: int, itemsize: int) -> int:
    """Elements of a row at a time."""
    return min(triton.next_power_of_2(width), BLOCK_BYTES // itemsize)


def rank_block(regions: Regions) -> int:
    return triton.next_power_of_2(regions.num_ranks)


@triton.jit
def pointer_at(address, dtype: tl.constexpr):
    """A pointer to a multiple of 16 bytes. Said of the integer the hint would be lost."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def rows_before(counts_ptr, rank, BLOCK_W: tl.constexpr):
    """Rows of the ranks below ``rank``, int64."""
    index = tl.arange(0, BLOCK_W)
    return tl.sum(tl.load(counts_ptr + index, mask=index < rank, other=0))


@triton.jit
def region_to_fill(targets_ptr, epoch_ptr, peer, rank, num_ranks, region_bytes):
    """Address of the region that ``rank`` fills for ``peer`` in the epoch that begins."""
    slot = (tl.load(epoch_ptr) + 1) % 2
    offset = region_offset(peer, rank, slot, num_ranks, region_bytes)
    return tl.load(targets_ptr + peer) + offset


@triton.jit
def region_to_read(arena_ptr, epoch_ptr, source, rank, num_ranks, region_bytes):
    """Address of what ``source`` wrote for ``rank`` in the epoch that has begun."""
    slot = tl.load(epoch_ptr) % 2
    offset = region_offset(rank, source, slot, num_ranks, region_bytes)
    return arena_ptr.to(tl.int64) + offset


@triton.jit
def store_header(region, header_at, num_rows, num_routes):
    header_ptr = pointer_at(region + header_at, tl.int64)
    tl.store(header_ptr, num_rows)
    tl.store(header_ptr + 1, num_routes)


@triton.jit
def copy_rows(
    source_ptr,
    index_ptr,
    target_ptr,
    count,
    worker,
    workers,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row i of the target is row ``index[i]`` of the source, or row i without an index.

    :param count: rows; the worker with number w, int64, copies the rows w, w + workers, ...
    """
    row = worker
    while row < count:
        source_row = row
        if index_ptr is not None:
            source_row = tl.load(index_ptr + row)
        for start in tl.static_range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < WIDTH
            values = tl.load(source_ptr + source_row * WIDTH + column, mask=mask)
            tl.store(target_ptr + row * WIDTH + column, values, mask=mask)
        row += workers


@triton.jit
def fill_rows(
    target_ptr,
    count,
    worker,
    workers,
    value,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same with ``value`` in place of rows."""
    row = worker
    while row < count:
        for start in tl.static_range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            values = tl.full([BLOCK], value, target_ptr.dtype.element_ty)
            tl.store(target_ptr + row * WIDTH + column, values, mask=column < WIDTH)
        row += workers


@triton.jit
def copy_values(source_ptr, target_ptr, count, worker, workers):
    """``count`` values that lie together on both sides: metadata of many rows at once."""
    start = worker * VALUES_BLOCK
    while start < count:
        index = start + tl.arange(0, VALUES_BLOCK)
        values = tl.load(source_ptr + index, mask=index < count)
        tl.store(target_ptr + index, values, mask=index < count)
        start += workers.to(tl.int64) * VALUES_BLOCK


@triton.jit
def fill_values(target_ptr, count, worker, workers, value):
    """The same with ``value`` in place of values."""
    start = worker * VALUES_BLOCK
    while start < count:
        index = start + tl.arange(0, VALUES_BLOCK)
        values = tl.full([VALUES_BLOCK], value, target_ptr.dtype.element_ty)
        tl.store(target_ptr + index, values, mask=index < count)
        start += workers.to(tl.int64) * VALUES_BLOCK
