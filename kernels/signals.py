"""Tell the peers that an epoch's rows are there, and wait for theirs. See [Note: mailbox] in
``olmo_shard/dispatch/mailbox.py``.

Example: W = 3, this is rank 1, ``epoch`` is 4. ``signal_peers`` sets flag 1 x 3 + 1 = 4 (slot 1,
source 1) of ranks 0 and 2 to 5, then ``epoch`` to 5. ``wait_signals`` waits until its own flags 3
and 5 (slot 1, sources 0 and 2) are 5. Say their headers are [2, 4] and [0, 0], and that this rank
keeps 1 row with 2 routes for itself: counts_W = [2, 1, 0], totals = [3, 6, 0].

Order: all rows, metadata and headers of an epoch were stored by kernels in front on the same
stream, so they happen before the release here; it is at system scope, since other GPUs read them.
The acquire there is at system scope, too; headers are read behind a barrier of the program, rows by
later kernels of the stream.

One program each. Bytes moved: 24 W of flags and headers. FLOPs: none.
"""

import torch
from torch import Tensor

from olmo_shard.kernels.language import interpreting, tl, triton
from olmo_shard.kernels.regions import Regions, region_offset
from olmo_shard.kernels.row_moves import rank_block

MISSING, AHEAD = 1, 2
"""What a word of ``error`` says of a peer: its flag was not set in time, or shows a later epoch."""
LOOK_NS = 500_000
"""Counted for one look at the flags in the interpreter, which has no clock."""


@triton.jit
def _signal_peers_kernel(flag_ptrs_ptr, epoch_ptr, rank, num_ranks, BLOCK_W: tl.constexpr):
    epoch = tl.load(epoch_ptr) + 1
    peer = tl.arange(0, BLOCK_W)
    address = tl.load(flag_ptrs_ptr + peer, mask=(peer < num_ranks) & (peer != rank), other=0)
    flag = address.to(tl.pointer_type(tl.int64)) + epoch % 2 * num_ranks + rank
    # All peers at once, one thread for each: a release goes there and back.
    tl.atomic_xchg(flag, epoch, mask=address != 0, sem="release", scope="sys")
    tl.debug_barrier()  # no thread may still read the epoch
    tl.store(epoch_ptr, epoch)


def signal_peers(flag_ptrs_W: Tensor, epoch: Tensor, regions: Regions) -> None:
    """End a put: the next epoch's flag at every peer, then ``epoch`` itself.

    :param flag_ptrs_W: int64 [W]: addresses of the peers' flags; 0 for those that are told with
        their rows (put_packed).
    :param epoch: int64 [1] on the device, raised by one.
    """
    _signal_peers_kernel[(1,)](
        flag_ptrs_W,
        epoch,
        regions.rank,
        regions.num_ranks,
        BLOCK_W=rank_block(regions),
        num_warps=1,
    )


@triton.jit
def _now():
    """Nanoseconds: one time for all 32 threads, which must leave a loop together."""
    return tl.max(tl.zeros([32], tl.int64) + tl.extra.cuda.globaltimer())


@triton.jit
def _wait_signals_kernel(
    flags_ptr,
    epoch_ptr,
    arena_ptr,
    own_counts_ptr,
    own_routes_ptr,
    error_ptr,
    counts_ptr,
    totals_ptr,
    limit,
    rank,
    num_ranks,
    max_rows,
    region_bytes,
    header_at,
    NUM_SLOTS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_CLOCK: tl.constexpr,
):
    epoch = tl.load(epoch_ptr)
    slot = epoch % 2
    source = tl.arange(0, BLOCK_W)
    is_rank = source < num_ranks
    is_peer = is_rank & (source != rank)
    old_error = tl.load(error_ptr + source, mask=is_rank, other=0)

    flag = flags_ptr + slot * num_ranks + source
    found = tl.zeros([BLOCK_W], tl.int64) + epoch
    ahead = tl.max(found) > epoch
    begun = epoch * 0
    if HAS_CLOCK:
        begun = _now()
    spent = begun - begun
    # After an error nothing makes sense any more: do not wait again, layer after layer.
    waiting = tl.max(old_error) == 0
    while waiting:
        found = tl.atomic_add(flag, 0, mask=is_peer, sem="acquire", scope="sys")
        found = tl.where(is_peer, found, epoch)
        ahead = tl.max(found) > epoch
        if HAS_CLOCK:
            spent = _now() - begun
        else:
            spent += 1
        waiting = (tl.min(found) < epoch) & (ahead == 0) & (spent < limit)
    tl.debug_barrier()  # headers are read by other threads than those that acquired
    missing = (found < epoch) & (ahead == 0)
    error = tl.where(found > epoch, 2, tl.where(missing, 1, old_error))
    tl.store(error_ptr + source, error, mask=is_rank)
    num_errors = tl.sum((error != 0).to(tl.int64))

    region = arena_ptr.to(tl.int64) + region_offset(rank, source, slot, num_ranks, region_bytes)
    header = (region + header_at).to(tl.pointer_type(tl.int64))
    is_own = source == rank
    # Whatever a header says, no kernel behind reads or writes past what there is.
    rows = tl.load(header, mask=is_peer, other=0)
    rows = tl.minimum(tl.maximum(rows, 0), max_rows)
    rows += tl.load(own_counts_ptr + source, mask=is_own, other=0)
    rows = tl.where(num_errors == 0, rows, 0)
    routes = tl.load(header + 1, mask=is_peer, other=0)
    if own_routes_ptr is not None:
        routes += tl.load(own_routes_ptr + source, mask=is_own, other=0)
    routes = tl.minimum(tl.maximum(routes, 0), rows * NUM_SLOTS)
    tl.store(counts_ptr + source, rows, mask=is_rank)
    tl.store(totals_ptr, tl.sum(rows))
    tl.store(totals_ptr + 1, tl.sum(routes))
    tl.store(totals_ptr + 2, num_errors)


def wait_signals(
    flags: Tensor,
    epoch: Tensor,
    arena: Tensor,
    own_counts_W: Tensor,
    own_routes_W: Tensor | None,
    error: Tensor,
    timeout_ns: int,
    regions: Regions,
) -> tuple[Tensor, Tensor]:
    """Wait until every peer's flag equals ``epoch``, at most ``timeout_ns``.

    :param flags: int64 [2 W], this rank's.
    :param arena: uint8, this rank's.
    :param own_counts_W: int64 [W]: element ``rank`` is the number of rows that this rank keeps for
        itself. Likewise ``own_routes_W``; null where routes are of no interest.
    :param error: int32 [W]: ``MISSING`` or ``AHEAD`` is written for a peer. Where there is an
        error, an old one included, nothing is waited for and there are no rows.
    :returns: int64 [W]: rows from each rank; int64 [3]: all rows, all routes, ranks with errors.
    """
    counts_W = torch.empty_like(own_counts_W)
    totals = torch.empty(3, dtype=torch.int64, device=flags.device)
    has_clock = not interpreting()
    _wait_signals_kernel[(1,)](
        flags,
        epoch,
        arena,
        own_counts_W,
        own_routes_W,
        error,
        counts_W,
        totals,
        timeout_ns if has_clock else -(-timeout_ns // LOOK_NS),
        regions.rank,
        regions.num_ranks,
        regions.max_rows,
        regions.region_bytes,
        regions.header_at,
        NUM_SLOTS=regions.num_slots,
        BLOCK_W=rank_block(regions),
        HAS_CLOCK=has_clock,
        num_warps=1,
    )
    return counts_W, totals
