"""Copy the received rows out of this rank's mailbox, ordered by the rank they came from.

Shape letters: T tokens, D width, S rows sent, R rows received, W ranks, m slots of a row.

Example: W = 3, this is rank 1, which keeps one row for itself; the output has room for 5 rows::

    counts_W = [2, 1, 1]         rows_RD = [a0, a1,  x[row_S[2]],  c0,     0]
                                            rank 0   rank 1        rank 2  after R

    local_expert_Rm is -1 and weights_Rm is 0 after R = 4.

The rows of this rank itself come straight from its tokens, by the list S. The kernel reads the
mailbox by plain loads, after ``wait_signals`` on the same stream. Outputs are fully written.

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
    fill_rows,
    fill_values,
    pointer_at,
    rank_block,
    region_to_read,
    row_block,
    rows_before,
)

PROGRAMS = 2048
"""Largest number of programs: about sixteen per multiprocessor of an H100. Both sides are local."""


@triton.jit(do_not_specialize=["num_rows_out"])
def _copy_received_kernel(
    x_ptr,
    row_ptr,
    own_weights_ptr,
    own_experts_ptr,
    own_counts_ptr,
    counts_ptr,
    arena_ptr,
    epoch_ptr,
    rows_ptr,
    weights_ptr,
    experts_ptr,
    num_rows_out,
    rank,
    num_ranks,
    region_bytes,
    experts_at,
    rows_at,
    NUM_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    # Axis 0 of the grid is the source rank. Source W stands for the outputs after R, which are
    # filled with zeros (rows, weights) or -1 (experts).
    source = tl.program_id(0)
    worker = tl.program_id(1).to(tl.int64)
    workers = tl.num_programs(1)
    first = rows_before(counts_ptr, source, BLOCK_W)
    room = tl.maximum(num_rows_out - first, 0)
    if source == num_ranks:
        if rows_ptr is not None:
            fill_rows(rows_ptr + first * WIDTH, room, worker, workers, 0.0, WIDTH, BLOCK)
        if weights_ptr is not None:
            weights_out = weights_ptr + first * NUM_SLOTS
            fill_values(weights_out, room * NUM_SLOTS, worker, workers, 0.0)
        if experts_ptr is not None:
            experts_out = experts_ptr + first * NUM_SLOTS
            fill_values(experts_out, room * NUM_SLOTS, worker, workers, -1)
    else:
        # The rows that came from one rank: this rank reads its own from the tokens, the others
        # from the mailbox.
        count = tl.minimum(tl.load(counts_ptr + source), room)
        own_first = rows_before(own_counts_ptr, rank, BLOCK_W)
        region = region_to_read(arena_ptr, epoch_ptr, source, rank, num_ranks, region_bytes)
        if rows_ptr is not None:
            rows_out = rows_ptr + first * WIDTH
            if source == rank:
                if row_ptr is not None:
                    index_ptr = row_ptr + own_first
                    copy_rows(x_ptr, index_ptr, rows_out, count, worker, workers, WIDTH, BLOCK)
                else:
                    own_ptr = x_ptr + own_first * WIDTH
                    copy_rows(own_ptr, None, rows_out, count, worker, workers, WIDTH, BLOCK)
            else:
                rows_in = pointer_at(region + rows_at, rows_ptr.dtype.element_ty)
                copy_rows(rows_in, None, rows_out, count, worker, workers, WIDTH, BLOCK)
        # Their metadata, from the same places.
        num_values = count * NUM_SLOTS
        if weights_ptr is not None:
            weights_in = pointer_at(region, tl.float32)
            if source == rank:
                weights_in = own_weights_ptr + own_first * NUM_SLOTS
            weights_out = weights_ptr + first * NUM_SLOTS
            copy_values(weights_in, weights_out, num_values, worker, workers)
        if experts_ptr is not None:
            experts_in = pointer_at(region + experts_at, tl.int32)
            if source == rank:
                experts_in = own_experts_ptr + own_first * NUM_SLOTS
            experts_out = experts_ptr + first * NUM_SLOTS
            copy_values(experts_in, experts_out, num_values, worker, workers)


def _copy_received(
    x_TD: Tensor | None,
    own: RowList,
    counts_W: Tensor,
    arena: Tensor,
    epoch: Tensor,
    regions: Regions,
    num_rows_out: int,
    num_programs: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Rows, weights and experts; ``None`` for each that does not travel."""
    shape, device = (num_rows_out, regions.num_slots), counts_W.device
    rows = None if x_TD is None else x_TD.new_empty(num_rows_out, regions.width)
    weights = experts = None
    if own.weights_Sm is not None:
        weights = torch.empty(shape, dtype=torch.float32, device=device)
    if own.local_expert_Sm is not None:
        experts = torch.empty(shape, dtype=torch.int32, device=device)
    if num_rows_out:
        sources = regions.num_ranks + 1
        _copy_received_kernel[(sources, max(1, min(num_rows_out, num_programs // sources)))](
            x_TD,
            own.row_S,
            own.weights_Sm,
            own.local_expert_Sm,
            own.counts_W,
            counts_W,
            arena,
            epoch,
            rows,
            weights,
            experts,
            num_rows_out,
            regions.rank,
            regions.num_ranks,
            regions.region_bytes,
            regions.experts_at,
            regions.rows_at,
            NUM_SLOTS=regions.num_slots,
            WIDTH=regions.width,
            BLOCK=row_block(regions.width, 4 if x_TD is None else x_TD.itemsize),
            BLOCK_W=rank_block(regions),
        )
    return rows, weights, experts


def copy_received_rows(
    x_TD: Tensor,
    sent: RowList,
    counts_W: Tensor,
    arena: Tensor,
    epoch: Tensor,
    regions: Regions,
    num_rows_out: int,
    num_programs: int = PROGRAMS,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the rows of all ranks, and their metadata if ``sent`` has metadata.

    :param x_TD: [T, D], contiguous: this rank's tokens, as passed to ``put_rows``.
    :param sent: the rows that this rank sent, including those for itself.
    :param counts_W: int64 [W]: rows from each rank, as returned by ``wait_signals``.
    :param arena: uint8: this rank's arena.
    :param epoch: int64 [1]: the epoch that has arrived.
    :param regions: sizes of the mailbox.
    :param num_rows_out: R, or an upper bound if the host does not know R.
    :param num_programs: upper bound of the number of programs.
    :returns: rows [num_rows_out, D]; router weights FP32 and local experts int32, both
        [num_rows_out, m], or ``None``.
    """
    assert x_TD.is_contiguous()
    assert x_TD.shape[1] == regions.width, "not the mailbox's rows"
    rows, weights, experts = _copy_received(
        x_TD, sent, counts_W, arena, epoch, regions, num_rows_out, num_programs
    )
    assert rows is not None
    return rows, weights, experts


def copy_returned_weights(
    own_weights_Rm: Tensor,
    received_W: Tensor,
    counts_W: Tensor,
    arena: Tensor,
    epoch: Tensor,
    regions: Regions,
    num_rows_out: int,
    num_programs: int = PROGRAMS,
) -> Tensor:
    """Return the router-weight gradients that came back: FP32 [num_rows_out, m], 0 after S.

    They belong to the rows of the list S, in its order.

    :param own_weights_Rm: FP32 [R, m]: gradients for the rows that this rank received, including
        those from itself.
    :param received_W: int64 [W]: rows that this rank has received from each rank.
    :param counts_W: int64 [W]: rows that come back from each rank.
    :param arena: uint8: this rank's arena.
    :param epoch: int64 [1]: the epoch that has arrived.
    :param regions: sizes of the mailbox.
    :param num_rows_out: S, or an upper bound.
    :param num_programs: upper bound of the number of programs.
    """
    own = RowList(counts_W=received_W, weights_Sm=own_weights_Rm)
    _, weights, _ = _copy_received(
        None, own, counts_W, arena, epoch, regions, num_rows_out, num_programs
    )
    assert weights is not None
    return weights


def copy_received_rows_ref(blocks: list[Tensor], num_rows_out: int, fill: float) -> Tensor:
    """The rows of each rank one after the other, padded with ``fill``, in plain torch.

    :param blocks: the rows from each rank, [rows, width].
    :returns: [num_rows_out, width].
    """
    together = torch.cat(blocks)
    rest = together.new_full((num_rows_out - len(together), together.shape[1]), fill)
    return torch.cat([together, rest])
