"""Add the rows that came back for each token: at most one per rank, in FP32 and in rank order.

Shape letters: T tokens, D width, W ranks of the expert-parallel group.
"""

import torch
from torch import Tensor

from olmo_shard.dispatch.row_plan import DispatchPlan

_TOKENS_PER_RUN = 64
"""If runs average at least this many tokens, one operation per run is faster than one per token."""


def sum_returned_rows(
    rows_of_rank: list[Tensor], plan: DispatchPlan, out_TD: Tensor | None = None
) -> Tensor:
    """The sum of each token's rows, [T, D] in the type of the rows.

    :param rows_of_rank: for each rank d its rows, [S_d, D] with S_d of ``plan.send_counts``; they
        need not be contiguous. FP32 rows are read in place.
    :param out_TD: FP32 tensor in which to add the rows; ``None`` allocates one.
    """
    first = rows_of_rank[0]
    if out_TD is None:
        shape = (plan.num_tokens, first.shape[1])
        out_TD = torch.empty(shape, dtype=torch.float32, device=first.device)
    fp32_rows = [rows.float() for rows in rows_of_rank]
    # Both ways add in rank order, so they give the same bits.
    ends = _ends_of_runs(plan.is_sent_WT)
    if len(ends) * _TOKENS_PER_RUN <= plan.num_tokens:
        _sum_by_run(fp32_rows, plan, ends, out_TD)
    else:
        _sum_by_token(fp32_rows, plan, out_TD)
    return out_TD.to(first.dtype)


def _ends_of_runs(is_sent_WT: Tensor) -> list[int]:
    """A run is a sequence of tokens that go to the same ranks: its rows are adjacent everywhere."""
    changes = (is_sent_WT[:, 1:] != is_sent_WT[:, :-1]).any(dim=0)
    return [*(changes.nonzero()[:, 0] + 1).tolist(), is_sent_WT.shape[1]]


def _sum_by_run(
    rows_of_rank: list[Tensor], plan: DispatchPlan, ends: list[int], out_TD: Tensor
) -> None:
    """Read every row once and write every sum once. Usual, since most tokens go to every rank."""
    # 1. The rows of each run, for each rank: a run has as many rows as tokens, or none.
    starts = [0, *ends[:-1]]
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    # For each rank and run: whether the run's tokens go to the rank, and their rows.
    is_sent = plan.is_sent_WT[:, starts].tolist()
    runs_of_rank = [
        rows.split([size if sent else 0 for size, sent in zip(sizes, sent_runs, strict=True)])
        for rows, sent_runs in zip(rows_of_rank, is_sent, strict=True)
    ]
    # 2. Add them run by run. The first addition writes the sums, so they need no zeros.
    for index, sums in enumerate(out_TD.split(sizes)):
        rows = [
            runs[index]
            for runs, sent_runs in zip(runs_of_rank, is_sent, strict=True)
            if sent_runs[index]
        ]
        if len(rows) > 1:
            torch.add(rows[0], rows[1], out=sums)
        elif rows:
            sums.copy_(rows[0])
        else:
            sums.zero_()
        for more in rows[2:]:
            sums.add_(more)


def _sum_by_token(rows_of_rank: list[Tensor], plan: DispatchPlan, out_TD: Tensor) -> None:
    """Copy rank 0's rows to their tokens: two thirds of the time of zeros and an addition."""
    is_sent_T = plan.is_sent_WT[0]
    # Reads an arbitrary row for tokens that rank 0 did not get; the fill corrects their sums.
    if len(rows_of_rank[0]):
        row_T = (is_sent_T.cumsum(0) - 1).clamp(min=0)
        torch.index_select(rows_of_rank[0], 0, row_T, out=out_TD)
    out_TD.index_fill_(0, (~is_sent_T).nonzero()[:, 0], 0)
    for tokens, rows in zip(plan.tokens_of_rank[1:], rows_of_rank[1:], strict=True):
        out_TD.index_add_(0, tokens, rows)
