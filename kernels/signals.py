"""Set the flags of an epoch at all peers, and wait for the flags that the peers set here.

See [Note: mailbox] in ``olmo_shard/dispatch/mailbox.py``.

Shape letters: W ranks of the expert-parallel group.

Example: W = 3, this is rank 1, ``epoch`` is 4. ``signal_peers`` sets flag 1 x 3 + 1 = 4 (buffer 1,
source 1) of ranks 0 and 2 to 5, and then ``epoch`` to 5. ``wait_signals`` waits until this rank's
flags 3 and 5 (buffer 1, sources 0 and 2) equal 5. Let their headers be [2, 4] and [0, 0], and let
this rank keep 1 row with 2 routes for itself. Then counts_W = [2, 1, 0] and totals = [3, 6, 0].

Memory order: earlier kernels on the same stream have stored all rows, metadata and headers of the
epoch. These stores happen before the release in ``signal_peers``. The release and the acquire in
``wait_signals`` are at system scope, because other GPUs take part. ``wait_signals`` reads the
headers after a barrier of its program; later kernels on the same stream read the rows.

Each of the two kernels is one program. Bytes moved: 24 W of flags and headers. FLOPs: none.
"""

import torch
from torch import Tensor

from olmo_shard.kernels.language import interpreting, tl, triton
from olmo_shard.kernels.regions import Regions, region_offset
from olmo_shard.kernels.row_moves import rank_block

MISSING, AHEAD = 1, 2
"""Values of ``error`` for a peer: its flag was not set in time, or holds a later epoch."""
POLL_NS = 500_000
"""Nanoseconds charged per poll of the flags in the interpreter, which has no clock."""


@triton.jit
def _signal_peers_kernel(flag_ptrs_ptr, epoch_ptr, rank, num_ranks, BLOCK_W: tl.constexpr):
    epoch = tl.load(epoch_ptr) + 1
    peer = tl.arange(0, BLOCK_W)
    address = tl.load(flag_ptrs_ptr + peer, mask=(peer < num_ranks) & (peer != rank), other=0)
    flag = address.to(tl.pointer_type(tl.int64)) + epoch % 2 * num_ranks + rank
    # One thread per peer, all at once: a release takes a round trip.
    tl.atomic_xchg(flag, epoch, mask=address != 0, sem="release", scope="sys")
    # No thread may still have to read the old epoch when it is overwritten.
    tl.debug_barrier()
    tl.store(epoch_ptr, epoch)


def signal_peers(flag_ptrs_W: Tensor, epoch: Tensor, regions: Regions) -> None:
    """End a put: set the flag of the next epoch at every peer, then increment ``epoch``.

    :param flag_ptrs_W: int64 [W]: addresses of the peers' flags. 0 marks a peer on another node,
        whose flag ``put_packed`` sets together with the rows.
    :param epoch: int64 [1] on the device: the number of completed puts; incremented by one.
    :param regions: sizes of the mailbox.
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
    """Time in nanoseconds, the same for all 32 threads, since they must leave a loop together."""
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
    # Phase 1: where this epoch's flags are, and whether an earlier wait has failed.
    epoch = tl.load(epoch_ptr)
    buffer = epoch % 2
    source = tl.arange(0, BLOCK_W)
    is_rank = source < num_ranks
    is_peer = is_rank & (source != rank)
    old_error = tl.load(error_ptr + source, mask=is_rank, other=0)

    flag = flags_ptr + buffer * num_ranks + source
    value = tl.zeros([BLOCK_W], tl.int64) + epoch
    ahead = tl.max(value) > epoch
    begun = epoch * 0
    if HAS_CLOCK:
        begun = _now()
    spent = begun - begun
    # Phase 2: poll until every flag equals the epoch, one flag is ahead, or time is up. After an
    # error of an earlier layer there is no wait, so that a lost peer costs one timeout and not
    # one per layer.
    waiting = tl.max(old_error) == 0
    while waiting:
        # An atomic addition of 0 is a load with acquire semantics at system scope.
        value = tl.atomic_add(flag, 0, mask=is_peer, sem="acquire", scope="sys")
        value = tl.where(is_peer, value, epoch)
        ahead = tl.max(value) > epoch
        if HAS_CLOCK:
            spent = _now() - begun
        else:
            spent += 1
        waiting = (tl.min(value) < epoch) & (ahead == 0) & (spent < limit)
    # Other threads than those that acquired may read the headers below.
    tl.debug_barrier()

    # Phase 3: record which peers are missing (1) or ahead (2).
    missing = (value < epoch) & (ahead == 0)
    error = tl.where(value > epoch, 2, tl.where(missing, 1, old_error))
    tl.store(error_ptr + source, error, mask=is_rank)
    num_errors = tl.sum((error != 0).to(tl.int64))

    # Phase 4: read the headers, and count rows and routes. The counts are clamped, so that no later
    # kernel reads or writes out of bounds, whatever a header contains.
    region = arena_ptr.to(tl.int64) + region_offset(rank, source, buffer, num_ranks, region_bytes)
    header = (region + header_at).to(tl.pointer_type(tl.int64))
    is_own = source == rank
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

    :param flags: int64 [2 W]: this rank's flags.
    :param epoch: int64 [1]: the epoch to wait for.
    :param arena: uint8: this rank's arena.
    :param own_counts_W: int64 [W]: element ``rank`` is the number of rows that this rank keeps for
        itself.
    :param own_routes_W: int64 [W]: element ``rank`` is the number of routes of these rows. ``None``
        counts the routes of the peers' headers only.
    :param error: int32 [W]: receives ``MISSING`` or ``AHEAD`` for a peer. If it holds an error
        already, the kernel does not wait. With any error all counts are 0.
    :param timeout_ns: limit of the wait in nanoseconds.
    :param regions: sizes of the mailbox.
    :returns: int64 [W], the rows from each rank; and int64 [3], the number of all rows, of all
        routes, and of ranks with errors.
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
        timeout_ns if has_clock else -(-timeout_ns // POLL_NS),
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
