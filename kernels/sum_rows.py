"""Add the rows that came back for a token, at most one a rank, straight from the mailbox.

Shape letters: T tokens, D width, W ranks, S rows of the list that was sent.

Example: W = 3, this is rank 1, rows of one element::

    counts_W = [2, 1, 1]       rows of the list S = [1, 2,   4,    8]
                                             rank 0's region own  rank 2's region
    row_WT   = [[0,  1, -1],
                [2, -1, -1],
                [3, -1, -1]]   out = [1 + 4 + 8, 2, 0]

In FP32 and in rank order, rounded once; tokens without rows are zero. Each row is read once.

Bytes moved per row: D x itemsize read; per token: D x itemsize written, 4 W of indices read. FLOPs
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
        # What has not come would be summed as it lies there: no step must be made of it.
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
    """The sum of each token's rows, [T, D] in the rows' type; NaN where ``totals`` has errors.

    :param own_rows: [>= counts_W[rank], D], contiguous: those that never left this rank.
    :param counts_W: int64 [W]: rows that were sent to each rank, as many as came back.
    :param row_WT: int32 [W, T]: the token's row for each rank as numbered in the list S; -1: none.
    :param totals: int64 [3], as ``wait_signals`` returned them.
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
    """The same in plain torch.

    :param rows_of_rank: for each rank the rows that came back from it.
    """
    rows_SD = torch.cat(rows_of_rank)
    padded = torch.cat([rows_SD, rows_SD.new_zeros(1, rows_SD.shape[1])]).float()
    total = torch.zeros(row_WT.shape[1], rows_SD.shape[1], device=rows_SD.device)
    for row_T in row_WT.long():
        total += padded[row_T]  # -1 is the last row
    return total.to(rows_SD.dtype)
