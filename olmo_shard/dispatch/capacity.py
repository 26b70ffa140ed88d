"""Which routes an expert takes when each may take only so many: decided at the source.

Each rank of tokens decides for itself, so the decision does not depend on where experts live. It
does depend on the micro-batch, by definition.
"""

import math

import torch
from torch import Tensor

_ROUNDING = 1e-9


def keep_within_capacity(
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    labelled_T: Tensor,
    num_experts: int,
    capacity_factor: float,
) -> Tensor:
    """Expert ids with -1 where a route is dropped, int64 [T, K].

    An expert takes at most ceil(capacity_factor x T' x K / E) routes of a rank's micro-batch, where
    T' counts its tokens that have a label, so that padding changes nothing. Of more, those with the
    highest weights stay, ties by token order; tokens without a label yield to those that have one.

    :param topk_idx_TK: int64 [T, K] distinct expert ids of each token.
    :param topk_weights_TK: [T, K] router weights; only their values matter.
    :param labelled_T: boolean [T].
    """
    num_tokens, top_k = topk_idx_TK.shape
    expert_R = topk_idx_TK.flatten()
    unlabelled_R = ~labelled_T[:, None].expand(num_tokens, top_k).flatten()
    # Stable sorts, the least important key first.
    order = torch.argsort(topk_weights_TK.detach().flatten(), descending=True, stable=True)
    order = order[torch.argsort(unlabelled_R[order].to(torch.uint8), stable=True)]
    order = order[torch.argsort(expert_R[order], stable=True)]

    counts_E = torch.bincount(expert_R, minlength=num_experts)
    starts_E = counts_E.cumsum(0) - counts_E
    place_R = torch.empty_like(expert_R)
    place_R[order] = torch.arange(len(order), device=order.device) - starts_E[expert_R[order]]
    # A little less than the product, so that 1.1 x 10 is 11 and not, by rounding, 12.
    exact = labelled_T.sum().double() * capacity_factor * top_k / num_experts
    kept_R = place_R < torch.ceil(exact - _ROUNDING)
    return torch.where(kept_R, expert_R, -1).view(num_tokens, top_k)


def most_rows(
    num_tokens: int, top_k: int, num_experts: int, num_ranks: int, factor: float | None
) -> int:
    """Rows that a rank sends to another one at most.

    :param num_tokens: tokens of a rank's micro-batch at most.
    """
    if factor is None:
        return num_tokens
    capacity = math.ceil(num_tokens * factor * top_k / num_experts - _ROUNDING)
    return min(num_tokens, capacity * (num_experts // num_ranks))
