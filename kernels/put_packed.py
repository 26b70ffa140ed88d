"""Send the packed rows of remote peers, each together with its flag, by one NVSHMEM put per peer.

A *remote* peer is on another node: this rank cannot reach its memory by loads and stores.

Shape letters: W ranks, D width, m slots of a row.

``put_rows`` has written the rows for a remote peer into this rank's staging memory. The layout of
the staging memory is that of the peer's arena, so one put per peer carries everything. The put
starts at the region's first byte, or at the region's header if there are no metadata or no rows. It
ends with the last row.

Example: a region with experts_at = 64, header_at = 128, rows_at = 192, and rows of 80 bytes. Two
rows with metadata are bytes 0 to 352, two rows without metadata bytes 128 to 352, and no rows are
bytes 128 to 192.

Arenas and flags are symmetric: an address of this rank means the same place at the peer. The kernel
runs after ``put_rows`` or ``reduce_and_put``, and before ``signal_peers``. The latter skips the
flags of remote peers, and increments the epoch for all peers.

Bytes moved per row: D x itemsize; per peer the metadata of max_rows rows, if any. FLOPs: none.

NVSHMEM's device functions appear in this file only. A kernel with such functions takes seconds to
compile, links with a library, and needs an initialisation when it is loaded.

[Note: staging] No kernel waits until a put has left the staging memory (NVSHMEM's *quiet*). The
same region of the staging memory is written again two epochs later, in epoch n + 2. By
[Note: mailbox] this rank starts epoch n + 2 only after the peer has consumed epoch n. The peer
consumed epoch n after it had seen the flag of n, and NVSHMEM sets that flag after the rows of the
same put. So the rows had arrived by then, and the put had finished reading its source.
"""

from typing import Any, NamedTuple

from torch import Tensor

from olmo_shard.kernels.language import interpreting, tl, triton
from olmo_shard.kernels.regions import Regions, region_offset

_SIGNAL_SET = tl.constexpr(9)


class RemotePeers(NamedTuple):
    """The ranks on other nodes, and how NVSHMEM reaches them."""

    ranks: Tensor
    """int64 [remote peers] on the device."""
    pes_W: Tensor
    """int32 [W] on the device: NVSHMEM's processing element (PE) of each rank."""
    staging: Tensor
    """uint8, symmetric memory with the layout of an arena."""
    bitcode: str
    """Path of NVSHMEM's device library (LLVM bitcode)."""


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
    """``nvshmemx_putmem_signal_nbi_block``, which all threads of a program call together."""
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
    """First byte of a region to send, and the number of bytes, both int64."""
    end = rows_at + num_rows * row_bytes
    begin = num_rows * 0 + header_at
    if WITH_METADATA:
        # Without rows there are no metadata either: the header suffices.
        begin = tl.where(num_rows > 0, 0, begin)
    return begin, end - begin


@triton.jit
def _put_packed_kernel(
    remote_ptr,
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
    peer = tl.load(remote_ptr + tl.program_id(0))
    count = tl.minimum(tl.load(counts_ptr + peer), max_rows)
    epoch = tl.load(epoch_ptr) + 1
    buffer = epoch % 2
    begin, num_bytes = packed_bytes(count, header_at, rows_at, row_bytes, WITH_METADATA)
    offset = region_offset(peer, rank, buffer, num_ranks, region_bytes) + begin
    flag = flags_ptr.to(tl.int64) + (buffer * num_ranks + rank) * 8
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
    remote: RemotePeers,
    counts_W: Tensor,
    arena: Tensor,
    flags: Tensor,
    epoch: Tensor,
    regions: Regions,
    itemsize: int,
    *,
    with_metadata: bool,
) -> None:
    """Put the region of each remote peer, then its flag. Returns before the data arrive.

    :param remote: the remote peers.
    :param counts_W: int64 [W]: rows that were packed for each rank.
    :param arena: uint8: this rank's arena, symmetric memory.
    :param flags: int64: this rank's flags, symmetric memory.
    :param epoch: int64 [1]: the number of completed puts.
    :param regions: sizes of the mailbox.
    :param itemsize: bytes per element of a row.
    :param with_metadata: whether router weights and expert numbers travel with the rows.
    """
    if remote.ranks.numel() == 0:
        return
    # The interpreter links no library; tests replace the put by a copy.
    linked = {} if interpreting() else {"extern_libs": {"libnvshmem_device": remote.bitcode}}
    _put_packed_kernel[(remote.ranks.numel(),)](
        remote.ranks,
        counts_W,
        arena,
        flags,
        remote.staging,
        remote.pes_W,
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
