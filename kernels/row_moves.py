"""Functions that the kernels which fill and empty mailboxes share: find a region, copy rows.

Shape letters: W ranks, D width, m slots of a row, S rows to send.

Rows are copied element by element without conversion, so every bit arrives. Accesses are 16 bytes
wide if D x itemsize is a multiple of 16, and otherwise as wide as the alignment allows. The
compiler knows the alignment of each row: ``pointer_at`` declares that the parts of a region start
at multiples of 16 bytes, and D is a compile-time constant.

Example: with D = 2048 in bf16 a row has 4096 bytes, which 128 threads copy by two loads and two
stores of 16 bytes per thread. With D = 2052 a row has 4104 bytes, and stores are 8 bytes wide.
"""

from typing import NamedTuple

from torch import Tensor

from olmo_shard.kernels.language import tl, triton
from olmo_shard.kernels.regions import Regions, region_offset

BLOCK_BYTES = 8192
"""Bytes of a row per iteration: 64 bytes per thread, which leaves registers for many programs."""
VALUES_BLOCK = tl.constexpr(512)
"""Router weights or expert numbers per iteration."""


class RowList(NamedTuple):
    """The rows that a rank sends (list S), ordered by destination, including those for itself."""

    counts_W: Tensor
    """int64 [W]: number of rows for each rank."""
    row_S: Tensor | None = None
    """int64 [>= S]: token of each row; ``None`` means that row s is token s."""
    routes_W: Tensor | None = None
    """int64 [W]: number of routes to each rank's experts, for the headers."""
    weights_Sm: Tensor | None = None
    """FP32 [>= S, m]: router weight of each slot."""
    local_expert_Sm: Tensor | None = None
    """int32 [>= S, m]: expert of each slot, as numbered on the destination rank."""


def row_block(width: int, itemsize: int) -> int:
    """Elements of a row per iteration of a copy: a power of two.

    :param width: D.
    :param itemsize: bytes per element.
    """
    return min(triton.next_power_of_2(width), BLOCK_BYTES // itemsize)


def rank_block(regions: Regions) -> int:
    """Smallest power of two that is at least W: the width of a vector over the ranks."""
    return triton.next_power_of_2(regions.num_ranks)


@triton.jit
def pointer_at(address, dtype: tl.constexpr):
    """Pointer to ``address``, declared a multiple of 16 bytes.

    The hint is on the pointer: Triton drops a hint on the integer at the conversion.
    """
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def rows_before(counts_ptr, rank, BLOCK_W: tl.constexpr):
    """Number of rows of all ranks below ``rank``, int64."""
    index = tl.arange(0, BLOCK_W)
    return tl.sum(tl.load(counts_ptr + index, mask=index < rank, other=0))


@triton.jit
def region_to_fill(peer_ptrs_ptr, epoch_ptr, peer, rank, num_ranks, region_bytes):
    """Address of the region that ``rank`` fills for ``peer`` in the epoch after ``epoch``."""
    buffer = (tl.load(epoch_ptr) + 1) % 2
    offset = region_offset(peer, rank, buffer, num_ranks, region_bytes)
    return tl.load(peer_ptrs_ptr + peer) + offset


@triton.jit
def region_to_read(arena_ptr, epoch_ptr, source, rank, num_ranks, region_bytes):
    """Address of the region that ``source`` has filled for ``rank`` in epoch ``epoch``."""
    buffer = tl.load(epoch_ptr) % 2
    offset = region_offset(rank, source, buffer, num_ranks, region_bytes)
    return arena_ptr.to(tl.int64) + offset


@triton.jit
def store_header(region, header_at, num_rows, num_routes):
    """Write the numbers of rows and routes into the header of a region."""
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
    """Copy row ``index[i]`` of the source, or row i without an index, to row i of the target.

    :param count: number of rows.
    :param worker: int64: number w of this worker, which copies the rows w, w + workers, ...
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
    """Fill ``count`` rows of the target with ``value``; workers as in ``copy_rows``."""
    row = worker
    while row < count:
        for start in tl.static_range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            values = tl.full([BLOCK], value, target_ptr.dtype.element_ty)
            tl.store(target_ptr + row * WIDTH + column, values, mask=column < WIDTH)
        row += workers


@triton.jit
def copy_values(source_ptr, target_ptr, count, worker, workers):
    """Copy ``count`` values that are contiguous on both sides: the metadata of many rows."""
    start = worker * VALUES_BLOCK
    while start < count:
        index = start + tl.arange(0, VALUES_BLOCK)
        values = tl.load(source_ptr + index, mask=index < count)
        tl.store(target_ptr + index, values, mask=index < count)
        start += workers.to(tl.int64) * VALUES_BLOCK


@triton.jit
def fill_values(target_ptr, count, worker, workers, value):
    """Fill ``count`` contiguous values of the target with ``value``."""
    start = worker * VALUES_BLOCK
    while start < count:
        index = start + tl.arange(0, VALUES_BLOCK)
        values = tl.full([VALUES_BLOCK], value, target_ptr.dtype.element_ty)
        tl.store(target_ptr + index, values, mask=index < count)
        start += workers.to(tl.int64) * VALUES_BLOCK
