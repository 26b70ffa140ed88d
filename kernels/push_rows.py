"""Copy rows, and what belongs to them, into the mailboxes of the ranks that want them.

Shape letters: N rows of the tokens, D width, S rows to send, W ranks, m slots of a row.

Example: W = 3, this is rank 1, epoch 4 begins, so its slot is 0::

    counts_W = [2, 1, 1]      row_S = [5, 7,    7,    2]
                                       rank 0   own   rank 2

    rank 0's region for rank 1, place (1 - 0) mod 3 - 1 = 0: rows x[5], x[7], header [2, ...]
    rank 2's region for rank 1, place (1 - 2) mod 3 - 1 = 1: row x[2], header [1, ...]

The own row x[7] does not travel. Every peer gets a header, with or without rows. ``targets_W`` says
where each peer's arena is: or, for a peer on another node, the own staging memory, which has the
layout of that peer's arena (put_packed sends it from there).

Nothing is visible to a peer before ``signal_peers``, which comes behind on the same stream. The
epoch is read from the device, so a captured graph is right in every step.

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
"""About four for each multiprocessor of an H100: 2 MiB of rows in flight at D = 2048 in bf16, more
than NVLink moves in the microsecond that two dependent loads take."""


@triton.jit
def _push_rows_kernel(
    x_ptr,
    row_ptr,
    counts_ptr,
    routes_ptr,
    weights_ptr,
    experts_ptr,
    targets_ptr,
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
    # Staggered, so that not all ranks write to the same one first.
    peer = (rank + 1 + tl.program_id(0)) % num_ranks
    worker = tl.program_id(1).to(tl.int64)
    workers = tl.num_programs(1)
    first = rows_before(counts_ptr, peer, BLOCK_W)
    # More would end in what lies behind the region.
    count = tl.minimum(tl.load(counts_ptr + peer), max_rows)
    region = region_to_fill(targets_ptr, epoch_ptr, peer, rank, num_ranks, region_bytes)

    if worker == 0:
        num_routes = tl.zeros((), tl.int64)
        if routes_ptr is not None:
            num_routes = tl.load(routes_ptr + peer)
        store_header(region, header_at, count, num_routes)
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


def push_rows(
    x_ND: Tensor,
    sent: RowList,
    targets_W: Tensor,
    epoch: Tensor,
    regions: Regions,
    max_rows_in_all: int,
    num_programs: int = PROGRAMS,
) -> None:
    """Fill this rank's region at every peer, in the epoch after ``epoch``.

    :param x_ND: [N, D], contiguous, in the mailbox's type.
    :param sent: which rows go where; tensors on the device.
    :param targets_W: int64 [W]: addresses of arenas, or of staging memory.
    :param epoch: int64 [1]: puts that were finished.
    :param max_rows_in_all: S at most.
    :param num_programs: in all, at most.
    """
    assert x_ND.is_contiguous()
    assert x_ND.shape[1] == regions.width, "not the mailbox's rows"
    num_peers = regions.num_ranks - 1
    if num_peers == 0:
        return
    most_rows = min(regions.max_rows, max_rows_in_all)
    workers = max(1, min(most_rows, num_programs // num_peers))
    _push_rows_kernel[(num_peers, workers)](
        x_ND,
        sent.row_S,
        sent.counts_W,
        sent.routes_W,
        sent.weights_Sm,
        sent.local_expert_Sm,
        targets_W,
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
        BLOCK=row_block(regions.width, x_ND.itemsize),
        BLOCK_W=rank_block(regions),
    )


def rows_by_rank_ref(x_ND: Tensor, sent: RowList) -> tuple[Tensor, ...]:
    """The rows for each rank, in plain torch."""
    counts = sent.counts_W.tolist()
    num_rows = sum(counts)
    rows_SD = x_ND[:num_rows] if sent.row_S is None else x_ND[sent.row_S[:num_rows]]
    return torch.split(rows_SD, counts)
