"""Store token rows and their metadata into the mailboxes of the ranks that own their experts.

Shape letters: T tokens, D width, S rows to send, W ranks, m slots of a row.

Example: W = 3, this is rank 1, epoch 4 begins, so its buffer is 0::

    counts_W = [2, 1, 1]      row_S = [5, 7,    7,      2]
                                       rank 0   rank 1  rank 2

    rank 0's region for rank 1, place (1 - 0) mod 3 - 1 = 0: rows x[5], x[7], header [2, ...]
    rank 2's region for rank 1, place (1 - 2) mod 3 - 1 = 1: row x[2], header [1, ...]

Row x[7] is for this rank itself and does not travel. Every peer gets a header, with or without
rows. ``peer_ptrs_W`` holds the address of each peer's arena. For a peer on another node it holds
the address of this rank's staging memory, which has the layout of that peer's arena;
``put_packed`` sends it from there.

The rows become visible to a peer with ``signal_peers``, which runs later on the same stream. The
kernel reads the epoch from device memory, so a captured CUDA graph is right in every step.

Bytes moved per row: D x itemsize read and written, and 8 m of metadata, also read and written.
FLOPs: none.
"""

import torch
from torch import Tensor

from olmo_shard.kernels.language import tl, triton
from olmo_shard.kernels.regions import Regions
from olmo_shard.kernels.row_moves import (
    RowList,
    copy_rows,
    copy_values,
    pointer_at,
    rank_block,
    region_to_fill,
    row_block,
    rows_before,
    store_header,
)

PROGRAMS = 512
"""Largest number of programs: about four per multiprocessor of an H100. At D = 2048 in bf16 they
keep 2 MiB of rows in flight, more than NVLink moves in the microsecond of two dependent loads."""


@triton.jit
def _put_rows_kernel(
    x_ptr,
    row_ptr,
    counts_ptr,
    routes_ptr,
    weights_ptr,
    experts_ptr,
    peer_ptrs_ptr,
    epoch_ptr,
    rank,
    num_ranks,
    max_rows,
    region_bytes,
    experts_at,
    header_at,
    rows_at,
    NUM_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    # Each rank starts with its successor, so that not all ranks write to one peer at first.
    peer = (rank + 1 + tl.program_id(0)) % num_ranks
    worker = tl.program_id(1).to(tl.int64)
    workers = tl.num_programs(1)
    first = rows_before(counts_ptr, peer, BLOCK_W)
    # More rows would overflow the region.
    count = tl.minimum(tl.load(counts_ptr + peer), max_rows)
    region = region_to_fill(peer_ptrs_ptr, epoch_ptr, peer, rank, num_ranks, region_bytes)

    # The header tells the peer how many rows and routes it has received.
    if worker == 0:
        num_routes = tl.zeros((), tl.int64)
        if routes_ptr is not None:
            num_routes = tl.load(routes_ptr + peer)
        store_header(region, header_at, count, num_routes)
    # Metadata, then the rows themselves.
    if weights_ptr is not None:
        weights_at = pointer_at(region, tl.float32)
        copy_values(weights_ptr + first * NUM_SLOTS, weights_at, count * NUM_SLOTS, worker, workers)
    if experts_ptr is not None:
        numbers_at = pointer_at(region + experts_at, tl.int32)
        copy_values(experts_ptr + first * NUM_SLOTS, numbers_at, count * NUM_SLOTS, worker, workers)
    target_ptr = pointer_at(region + rows_at, x_ptr.dtype.element_ty)
    if row_ptr is not None:
        copy_rows(x_ptr, row_ptr + first, target_ptr, count, worker, workers, WIDTH, BLOCK)
    else:
        copy_rows(x_ptr + first * WIDTH, None, target_ptr, count, worker, workers, WIDTH, BLOCK)


def put_rows(
    x_TD: Tensor,
    sent: RowList,
    peer_ptrs_W: Tensor,
    epoch: Tensor,
    regions: Regions,
    max_rows_in_all: int,
    num_programs: int = PROGRAMS,
) -> None:
    """Fill this rank's region at every peer, in the epoch after ``epoch``.

    :param x_TD: [T, D], contiguous, in the mailbox's dtype.
    :param sent: the rows for each rank; tensors on the device.
    :param peer_ptrs_W: int64 [W]: addresses of the peers' arenas, or of the staging memory.
    :param epoch: int64 [1]: the number of completed puts.
    :param regions: sizes of the mailbox.
    :param max_rows_in_all: upper bound of S.
    :param num_programs: upper bound of the number of programs.
    """
    assert x_TD.is_contiguous()
    assert x_TD.shape[1] == regions.width, "not the mailbox's rows"
    num_peers = regions.num_ranks - 1
    if num_peers == 0:
        return
    most_rows = min(regions.max_rows, max_rows_in_all)
    workers = max(1, min(most_rows, num_programs // num_peers))
    _put_rows_kernel[(num_peers, workers)](
        x_TD,
        sent.row_S,
        sent.counts_W,
        sent.routes_W,
        sent.weights_Sm,
        sent.local_expert_Sm,
        peer_ptrs_W,
        epoch,
        regions.rank,
        regions.num_ranks,
        regions.max_rows,
        regions.region_bytes,
        regions.experts_at,
        regions.header_at,
        regions.rows_at,
        NUM_SLOTS=regions.num_slots,
        WIDTH=regions.width,
        BLOCK=row_block(regions.width, x_TD.itemsize),
        BLOCK_W=rank_block(regions),
    )


def put_rows_ref(x_TD: Tensor, sent: RowList) -> tuple[Tensor, ...]:
    """The rows for each rank, in plain torch: W tensors [rows, D]."""
    counts = sent.counts_W.tolist()
    num_rows = sum(counts)
    rows_SD = x_TD[:num_rows] if sent.row_S is None else x_TD[sent.row_S[:num_rows]]
    return torch.split(rows_SD, counts)
