"""Which token rows go to which rank: index arithmetic alone, no communication.

Shape letters: T tokens, K top-k, W ranks of the expert-parallel group, e local experts,
m = min(K, e) slots of a row, S rows that this rank sends (its own included).

Example: W = 2, e = 2, two tokens with K = 2::

    topk_idx_TK = [[3, 0],   token 0: expert 3 (rank 1), expert 0 (rank 0)
                   [2, 3]]   token 1: both on rank 1, so its row travels once

    token_S         = [0,        0,        1]         rows by (rank, token)
    send_counts_W   = [1,                  2]
    route_Sm        = [[1, -1], [0, -1], [2, 3]]      index into the flattened [T, K]
    local_expert_Sm = [[0, -1], [1, -1], [0, 1]]      expert number on the destination rank
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """The rows that a rank sends; each token at most once to each rank."""

    num_tokens: int
    top_k: int
    token_S: Tensor
    """int64 [S]: token of each row, ordered by (destination rank, token)."""
    send_counts_W: Tensor
    """int64 [W]: rows for each rank."""
    route_Sm: Tensor
    """int64 [S, m]: the row's routes as indices into the flattened [T, K]; -1 in empty slots."""
    local_expert_Sm: Tensor
    """int32 [S, m]: the routes' experts as numbered on the destination rank; -1 in empty slots."""


def make_plan(topk_idx_TK: Tensor, num_ranks: int, num_local_experts: int) -> DispatchPlan:
    """Make the plan of one MoE layer and micro-batch.

    :param topk_idx_TK: int64 [T, K], distinct global expert ids of each token.
    :param num_ranks: W; rank d holds the experts d x e to (d + 1) x e - 1.
    :param num_local_experts: e.
    """
    num_tokens, top_k = topk_idx_TK.shape
    rank_TK = topk_idx_TK // num_local_experts
    goes_TW = torch.zeros(num_tokens, num_ranks, dtype=torch.bool, device=topk_idx_TK.device)
    goes_TW.scatter_(1, rank_TK, value=True)
    destination_S, token_S = goes_TW.T.nonzero(as_tuple=True)

    here_SK = rank_TK[token_S] == destination_S[:, None]
    slots = min(top_k, num_local_experts)
    # A stable sort moves the routes to this rank to the front and keeps their order.
    k_Sm = torch.argsort((~here_SK).to(torch.uint8), dim=1, stable=True)[:, :slots]
    filled_Sm = here_SK.gather(1, k_Sm)
    expert_Sm = topk_idx_TK[token_S].gather(1, k_Sm) % num_local_experts
    return DispatchPlan(
        num_tokens=num_tokens,
        top_k=top_k,
        token_S=token_S,
        send_counts_W=goes_TW.sum(dim=0),
        route_Sm=torch.where(filled_Sm, token_S[:, None] * top_k + k_Sm, -1),
        local_expert_Sm=torch.where(filled_Sm, expert_Sm, -1).to(torch.int32),
    )
