"""Send what ``push_rows`` packed for the ranks of other nodes, each with its flag, by NVSHMEM.

Shape letters: W ranks, F of them far (on other nodes), D width, m slots of a row.

Rows for a far peer were written into the own staging memory, where the region lies as it does in
the peer's arena. So one put per peer carries all: from the region's start, or from its header where
rows travel without metadata or there are none, to the end of the last row.

Example: a region with experts_at = 64, header_at = 128, rows_at = 192, rows of 80 bytes. With
metadata two rows are bytes 0 to 352, without it bytes 128 to 352; no row at all is 128 to 192.

Arenas and flags are symmetric: an own address means the same place at the peer. Runs between
``push_rows`` or ``reduce_and_push`` and ``signal_peers``, which skips far peers, and raises the
epoch for all.

Bytes moved per row: D x itemsize, and the metadata of max_rows rows if any. FLOPs: none.

NVSHMEM's device functions appear in this file alone: a kernel with them takes seconds to compile,
links with a library, and must be initialised when it is loaded.

[Note: staging] Nothing here waits for a put to have left the staging memory (quiet). A region of it
is written again two epochs later, at n + 2. By [Note: mailbox] this rank starts n + 2 only after
the peer has consumed n, and the peer did that only after it saw the flag of n, which NVSHMEM sets
behind the rows of the same put. So the rows had arrived, and nobody reads their source any more.
"""

from typing import Any, NamedTuple

from torch import Tensor

from olmo_shard.kernels.language import interpreting, tl, triton
from olmo_shard.kernels.regions import Regions, region_offset

_SIGNAL_SET = tl.constexpr(9)


class FarPeers(NamedTuple):
    """The ranks of other nodes, and how to reach them."""

    ranks_F: Tensor
    """int64 [F] on the device."""
    pes_W: Tensor
    """int32 [W] on the device: the processing element of each rank."""
    staging: Tensor
    """uint8, symmetric, laid out as an arena."""
    bitcode: str
    """Path of NVSHMEM's device library."""


@tl.core.extern
def _put_with_signal(
    target: Any,
    source: Any,
    num_bytes: Any,
    flag: Any,
    value: Any,
    how: Any,
    pe: Any,
    _semantic: Any = None,
) -> Any:
    """``nvshmemx_putmem_signal_nbi_block``: all threads of the program call it, together."""
    i32, i64, u64 = (tl.core.dtype(name) for name in ("int32", "int64", "uint64"))
    return tl.core.extern_elementwise(
        "",
        "",
        [target, source, num_bytes, flag, value, how, pe],
        {(i64, i64, i64, i64, u64, i32, i32): ("nvshmemx_putmem_signal_nbi_block", i32)},
        is_pure=False,
        _semantic=_semantic,
    )


@triton.jit
def packed_bytes(num_rows, header_at, rows_at, row_bytes, WITH_METADATA: tl.constexpr):
    """First byte of a region that is sent, and how many; int64."""
    end = rows_at + num_rows * row_bytes
    begin = num_rows * 0 + header_at
    if WITH_METADATA:
        begin = tl.where(num_rows > 0, 0, begin)  # no rows have no metadata
    return begin, end - begin


@triton.jit
def _put_packed_kernel(
    far_ptr,
    counts_ptr,
    arena_ptr,
    flags_ptr,
    staging_ptr,
    pes_ptr,
    epoch_ptr,
    rank,
    num_ranks,
    max_rows,
    region_bytes,
    header_at,
    rows_at,
    row_bytes,
    WITH_METADATA: tl.constexpr,
):
    peer = tl.load(far_ptr + tl.program_id(0))
    count = tl.minimum(tl.load(counts_ptr + peer), max_rows)
    epoch = tl.load(epoch_ptr) + 1
    slot = epoch % 2
    begin, num_bytes = packed_bytes(count, header_at, rows_at, row_bytes, WITH_METADATA)
    offset = region_offset(peer, rank, slot, num_ranks, region_bytes) + begin
    flag = flags_ptr.to(tl.int64) + (slot * num_ranks + rank) * 8
    _put_with_signal(
        arena_ptr.to(tl.int64) + offset,
        staging_ptr.to(tl.int64) + offset,
        num_bytes,
        flag,
        epoch.to(tl.uint64),
        _SIGNAL_SET,
        tl.load(pes_ptr + peer),
    )


def put_packed(
    far: FarPeers,
    counts_W: Tensor,
    arena: Tensor,
    flags: Tensor,
    epoch: Tensor,
    regions: Regions,
    itemsize: int,
    *,
    with_metadata: bool,
) -> None:
    """Put each far peer's region, then its flag; returns before they have arrived.

    :param counts_W: int64 [W]: rows that were packed for each rank.
    :param arena: this rank's, uint8, symmetric; likewise ``flags``, int64.
    :param epoch: int64 [1]: puts that were finished.
    :param itemsize: of an element of a row.
    """
    if far.ranks_F.numel() == 0:
        return
    # The interpreter has nothing to link; tests give it a put of their own.
    linked = {} if interpreting() else {"extern_libs": {"libnvshmem_device": far.bitcode}}
    _put_packed_kernel[(far.ranks_F.numel(),)](
        far.ranks_F,
        counts_W,
        arena,
        flags,
        far.staging,
        far.pes_W,
        epoch,
        regions.rank,
        regions.num_ranks,
        regions.max_rows,
        regions.region_bytes,
        regions.header_at,
        regions.rows_at,
        regions.width * itemsize,
        WITH_METADATA=with_metadata,
        **linked,
    )
