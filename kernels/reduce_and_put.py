"""Sum the pairs of each received row, and store the sum in the mailbox of the row's source rank.

Shape letters: R rows received, D width, P pairs (row, local expert), m slots of a row, W ranks.

Example: W = 3, this is rank 1, rows of one element::

    counts_W  = [1, 1, 2]                        y_PD = [1, 2, 4, 8]
    pair_Rm   = [[0, 3], [2, -1], [-1, -1], [1, -1]]
    sums      = [9, 4, 0, 2]
                 |  |  +--+-- rank 2's region for rank 1
                 |  own_out[0], since this rank is rank 1
                 rank 0's region for rank 1

The sums are bitwise those of ``sum_pairs``. Router-weight gradients, if any, go to the same
regions; those for this rank's own rows stay where they are. Every peer gets a header, with or
without rows.

Bytes moved per pair: D x itemsize read. Per row: D x itemsize written, 4 m of indices read, and 4 m
of router-weight gradients, if any, read and written. FLOPs per pair: D.
"""

from torch import Tensor

from olmo_shard.kernels.language import tl, triton
from olmo_shard.kernels.put_rows import PROGRAMS
from olmo_shard.kernels.regions import Regions
from olmo_shard.kernels.row_moves import (
    copy_values,
    pointer_at,
    rank_block,
    region_to_fill,
    row_block,
    rows_before,
    store_header,
)
from olmo_shard.kernels.sum_pairs import sum_pairs_of_rows


@triton.jit
def _reduce_and_put_kernel(
    y_ptr,
    pair_ptr,
    counts_ptr,
    weights_ptr,
    own_ptr,
    peer_ptrs_ptr,
    epoch_ptr,
    max_own,
    rank,
    num_ranks,
    max_rows,
    region_bytes,
    header_at,
    rows_at,
    NUM_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    # Each rank starts with its successor and ends with the rows that came from itself.
    source = (rank + 1 + tl.program_id(0)) % num_ranks
    worker = tl.program_id(1).to(tl.int64)
    workers = tl.num_programs(1)
    first = rows_before(counts_ptr, source, BLOCK_W)
    count = tl.load(counts_ptr + source)
    pair_ptr += first * NUM_SLOTS
    if source == rank:
        # Local rows: no mailbox.
        count = tl.minimum(count, max_own)
        sum_pairs_of_rows(y_ptr, pair_ptr, own_ptr, count, worker, workers, NUM_SLOTS, WIDTH, BLOCK)
    else:
        # More rows would overflow the region.
        count = tl.minimum(count, max_rows)
        region = region_to_fill(peer_ptrs_ptr, epoch_ptr, source, rank, num_ranks, region_bytes)
        if worker == 0:
            store_header(region, header_at, count, count * 0)
        if weights_ptr is not None:
            weights_at = pointer_at(region, tl.float32)
            copy_values(
                weights_ptr + first * NUM_SLOTS, weights_at, count * NUM_SLOTS, worker, workers
            )
        target_ptr = pointer_at(region + rows_at, y_ptr.dtype.element_ty)
        sum_pairs_of_rows(
            y_ptr, pair_ptr, target_ptr, count, worker, workers, NUM_SLOTS, WIDTH, BLOCK
        )


def reduce_and_put(
    y_PD: Tensor,
    pair_Rm: Tensor,
    counts_W: Tensor,
    weights_Rm: Tensor | None,
    peer_ptrs_W: Tensor,
    epoch: Tensor,
    regions: Regions,
    own_out: Tensor,
    num_programs: int = PROGRAMS,
) -> None:
    """Fill this rank's region at every peer, in the epoch after ``epoch``, and ``own_out``.

    :param y_PD: [P, D], contiguous, in the mailbox's dtype: the experts' outputs.
    :param pair_Rm: int32 [>= R, m]: the pairs of each row, -1 in empty slots; rows are ordered by
        source.
    :param counts_W: int64 [W]: rows received from each rank.
    :param weights_Rm: FP32 [>= R, m]: router-weight gradients, or ``None``.
    :param peer_ptrs_W: int64 [W]: addresses of the peers' arenas, or of the staging memory.
    :param epoch: int64 [1]: the number of completed puts.
    :param regions: sizes of the mailbox.
    :param own_out: [max_own, D]: receives the sums of the rows that came from this rank itself.
        Rows after their number are not written.
    :param num_programs: upper bound of the number of programs.
    """
    assert y_PD.is_contiguous()
    assert pair_Rm.is_contiguous()
    assert y_PD.shape[1] == own_out.shape[1] == regions.width, "not the mailbox's rows"
    assert y_PD.dtype == own_out.dtype
    most_rows = max(regions.max_rows, len(own_out))
    _reduce_and_put_kernel[
        (regions.num_ranks, max(1, min(most_rows, num_programs // regions.num_ranks)))
    ](
        y_PD,
        pair_Rm,
        counts_W,
        weights_Rm,
        own_out,
        peer_ptrs_W,
        epoch,
        len(own_out),
        regions.rank,
        regions.num_ranks,
        regions.max_rows,
        regions.region_bytes,
        regions.header_at,
        regions.rows_at,
        NUM_SLOTS=regions.num_slots,
        WIDTH=regions.width,
        BLOCK=row_block(regions.width, y_PD.itemsize),
        BLOCK_W=rank_block(regions),
    )
