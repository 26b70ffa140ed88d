"""Sum the rows that came back for each token, at most one per rank, straight from the mailbox.

Shape letters: T tokens, D width, W ranks, S rows of the list that was sent.

Example: W = 3, this is rank 1, rows of one element::

    counts_W = [2, 1, 1]       rows of the list S = [1, 2,   4,    8]
                                             rank 0   rank 1   rank 2
    row_WT   = [[0,  1, -1],
                [2, -1, -1],
                [3, -1, -1]]   out = [1 + 4 + 8, 2, 0]

Rows of other ranks are read from their regions in this rank's mailbox; rows of this rank itself
(here rank 1) are read from ``own_rows``. The sum is FP32, in rank order, and rounded once. Tokens
without rows are zero. Each row is read once.

Bytes moved per row: D x itemsize read. Per token: D x itemsize written, 4 W of indices read. FLOPs
per row: D.
"""

import torch
from torch import Tensor

from olmo_shard.kernels.language import tl, triton
from olmo_shard.kernels.regions import Regions
from olmo_shard.kernels.row_moves import pointer_at, region_to_read, row_block


@triton.jit
def _sum_rows_kernel(
    own_ptr,
    counts_ptr,
    row_ptr,
    arena_ptr,
    epoch_ptr,
    totals_ptr,
    out_ptr,
    num_tokens,
    rank,
    num_ranks,
    region_bytes,
    rows_at,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    # Add in rank order; ``first`` counts the rows of the ranks before.
    total = tl.zeros([BLOCK], tl.float32)
    first = token * 0
    index_ptr = row_ptr + token
    for source in range(num_ranks):
        row = tl.load(index_ptr).to(tl.int64)
        if row >= 0:
            start = (row - first) * WIDTH
            if source == rank:
                values = tl.load(own_ptr + start + column, mask=mask, other=0)
            else:
                region = region_to_read(arena_ptr, epoch_ptr, source, rank, num_ranks, region_bytes)
                rows = pointer_at(region + rows_at, out_ptr.dtype.element_ty)
                values = tl.load(rows + start + column, mask=mask, other=0)
            total += values.to(tl.float32)
        first += tl.load(counts_ptr + source)
        index_ptr += num_tokens
    if totals_ptr is not None:
        # After a failed wait the mailbox holds old rows. NaN keeps the optimizer from a step.
        total = tl.where(tl.load(totals_ptr + 2) == 0, total, float("nan"))
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * WIDTH + column, out, mask=mask)


def sum_rows(
    own_rows: Tensor,
    counts_W: Tensor,
    row_WT: Tensor,
    arena: Tensor,
    epoch: Tensor,
    regions: Regions,
    totals: Tensor | None = None,
) -> Tensor:
    """Return the sum of each token's rows, [T, D] in the rows' dtype; NaN if ``totals`` has errors.

    :param own_rows: [>= counts_W[rank], D], contiguous: the rows that never left this rank.
    :param counts_W: int64 [W]: rows sent to each rank, and returned by it.
    :param row_WT: int32 [W, T]: number, in the list S, of the token's row for each rank; -1 for
        none.
    :param arena: uint8: this rank's arena.
    :param epoch: int64 [1]: the epoch that has arrived.
    :param regions: sizes of the mailbox.
    :param totals: int64 [3], as returned by ``wait_signals``; ``None`` skips the check for errors.
    """
    assert own_rows.is_contiguous()
    assert row_WT.is_contiguous()
    assert own_rows.shape[1] == regions.width, "not the mailbox's rows"
    num_tokens = row_WT.shape[1]
    out_TD = own_rows.new_empty(num_tokens, regions.width)
    block = row_block(regions.width, own_rows.itemsize)
    if num_tokens:
        _sum_rows_kernel[(num_tokens, triton.cdiv(regions.width, block))](
            own_rows,
            counts_W,
            row_WT,
            arena,
            epoch,
            totals,
            out_TD,
            num_tokens,
            regions.rank,
            regions.num_ranks,
            regions.region_bytes,
            regions.rows_at,
            WIDTH=regions.width,
            BLOCK=block,
        )
    return out_TD


def sum_rows_ref(rows_of_rank: list[Tensor], row_WT: Tensor) -> Tensor:
    """The sum of each token's rows in plain torch, [T, D].

    :param rows_of_rank: the rows that came back from each rank, [rows, D].
    """
    rows_SD = torch.cat(rows_of_rank)
    padded = torch.cat([rows_SD, rows_SD.new_zeros(1, rows_SD.shape[1])]).float()
    total = torch.zeros(row_WT.shape[1], rows_SD.shape[1], device=rows_SD.device)
    for row_T in row_WT.long():
        total += padded[row_T]  # index -1 is the row of zeros
    return total.to(rows_SD.dtype)
