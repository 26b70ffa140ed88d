"""Add the rows that came back for a token, at most one a rank, in FP32 and in rank order."""

import torch
from torch import Tensor

from olmo_shard.dispatch.plan import DispatchPlan

_TOKENS_A_PIECE = 64
"""Where pieces are at least this long on average, one operation for each is the faster way."""


def sum_rows(
    rows_of_rank: list[Tensor], plan: DispatchPlan, out_TD: Tensor | None = None
) -> Tensor:
    """The sum of each token's rows, [T, D] in the rows' type; both ways below give the same values.

    :param rows_of_rank: for each rank its rows, [S_d, D] with S_d of ``plan.send_counts``; they
        need not be contiguous. In FP32 they are read in place.
    :param out_TD: FP32, where to add them.
    """
    like = rows_of_rank[0]
    if out_TD is None:
        shape = (plan.num_tokens, like.shape[1])
        out_TD = torch.empty(shape, dtype=torch.float32, device=like.device)
    rows = [each.float() for each in rows_of_rank]
    ends = _ends_of_pieces(plan.goes_WT)
    if len(ends) * _TOKENS_A_PIECE <= plan.num_tokens:
        _sum_by_piece(rows, plan, ends, out_TD)
    else:
        _sum_by_token(rows, plan, out_TD)
    return out_TD.to(like.dtype)


def _ends_of_pieces(goes_WT: Tensor) -> list[int]:
    """A piece is a run of tokens that go to the same ranks, so its rows lie together everywhere."""
    changes = (goes_WT[:, 1:] != goes_WT[:, :-1]).any(dim=0)
    return [*(changes.nonzero()[:, 0] + 1).tolist(), goes_WT.shape[1]]


def _sum_by_piece(
    rows_of_rank: list[Tensor], plan: DispatchPlan, ends: list[int], out_TD: Tensor
) -> None:
    """Reads every row once, writes every sum once: as a rule each rank gets nearly every token."""
    starts = [0, *ends[:-1]]
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    goes = plan.goes_WT[:, starts].tolist()
    parts = [
        rows.split([size if there else 0 for size, there in zip(sizes, members, strict=True)])
        for rows, members in zip(rows_of_rank, goes, strict=True)
    ]
    for index, piece in enumerate(out_TD.split(sizes)):
        rows = [part[index] for part, members in zip(parts, goes, strict=True) if members[index]]
        if len(rows) > 1:
            torch.add(rows[0], rows[1], out=piece)
        elif rows:
            piece.copy_(rows[0])
        else:
            piece.zero_()
        for others in rows[2:]:
            piece.add_(others)


def _sum_by_token(rows_of_rank: list[Tensor], plan: DispatchPlan, out_TD: Tensor) -> None:
    """Rank 0's rows are copied to their tokens: two thirds of the time of zeros and an addition."""
    goes_T = plan.goes_WT[0]
    if len(rows_of_rank[0]):
        row_T = (goes_T.cumsum(0) - 1).clamp(min=0)
        torch.index_select(rows_of_rank[0], 0, row_T, out=out_TD)
    out_TD.index_fill_(0, (~goes_T).nonzero()[:, 0], 0)
    for tokens, rows in zip(plan.tokens_of_rank[1:], rows_of_rank[1:], strict=True):
        out_TD.index_add_(0, tokens, rows)
