"""Which token rows go to which rank: index arithmetic alone, no communication.

Shape letters: T tokens, K top-k, W ranks of the expert-parallel group, e local experts,
m = min(K, e) slots of a row, S rows that this rank sends (its own included).

A row's slots hold its routes: slot k the token's k-th route where K <= e, else slot i the route to
local expert i. Either way no two routes of a row meet, and no sort is needed.

Example: W = 2, e = 2, K = 2, three tokens; -1 is a route that was dropped::

    topk_idx_TK = [[3, 0],    token 0: expert 3 (rank 1), expert 0 (rank 0)
                   [2, 3],    token 1: both on rank 1, so its row travels once
                   [-1, 1]]   token 2: expert 1 (rank 0)

    token_S         = [0,       2,       0,       1]         rows by (rank, token)
    send_counts     = [2,                2]
    local_expert_Sm = [[-1, 0], [-1, 1], [1, -1], [0, 1]]    as numbered on the destination rank
    goes_WT         = [[1, 0, 1], [1, 1, 0]]
    slot_TK         = [[6, 3],    index into the slots of [1 + S, m]; row 0 is the bin of the
                       [8, 9],    routes that were dropped
                       [0, 5]]
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """The rows that a rank sends; each token at most once to each rank."""

    layer: int
    """Block of the model, for messages and figures."""
    token_S: Tensor
    """int64 [S]: token of each row, ordered by (destination rank, token)."""
    send_counts_W: Tensor
    """int64 [W]: rows for each rank."""
    local_expert_Sm: Tensor
    """int32 [S, m]: the routes' experts as numbered on the destination rank; -1 in empty slots."""
    goes_WT: Tensor
    """Boolean [W, T]: whether a row of the token goes to the rank."""
    slot_TK: Tensor
    """int64 [T, K]: slot of each route in the flattened [1 + S, m]; row 0 is a bin for dropped
    routes, row 1 + s is row s."""

    @property
    def num_tokens(self) -> int:
        return self.slot_TK.shape[0]

    @cached_property
    def send_counts(self) -> list[int]:
        """Rows for each rank, on the host."""
        return self.send_counts_W.tolist()

    @cached_property
    def tokens_of_rank(self) -> tuple[Tensor, ...]:
        """``token_S`` by destination rank."""
        return self.token_S.split(self.send_counts)

    def weights_by_slot(self, topk_weights_TK: Tensor) -> Tensor:
        """FP32 [S, m]: router weight of each slot, 0 in empty ones."""
        num_rows, num_slots = self.local_expert_Sm.shape
        slots = topk_weights_TK.new_zeros((1 + num_rows) * num_slots)
        slots.scatter_(0, self.slot_TK.flatten(), topk_weights_TK.flatten())
        return slots.view(1 + num_rows, num_slots)[1:]

    def weights_by_route(self, weights_Sm: Tensor) -> Tensor:
        """[T, K]: the inverse; 0 for dropped routes."""
        nothing = weights_Sm.new_zeros(1, weights_Sm.shape[1])
        return torch.cat([nothing, weights_Sm]).take(self.slot_TK)


def make_plan(
    topk_idx_TK: Tensor, num_ranks: int, num_local_experts: int, layer: int = 0
) -> DispatchPlan:
    """Make the plan of one MoE layer and micro-batch.

    :param topk_idx_TK: int64 [T, K], distinct global expert ids of each token; -1 where a route was
        dropped.
    :param num_ranks: W; rank d holds the experts d x e to (d + 1) x e - 1.
    :param num_local_experts: e.
    """
    num_tokens, top_k = topk_idx_TK.shape
    assert (num_ranks + 1) * num_tokens < 2**31, "cells and rows are counted in 32 bits"
    num_slots = min(top_k, num_local_experts)
    device = topk_idx_TK.device
    # int32 takes a quarter of the time of int64 on a CPU, and a quotient in FP32 (exact below 2^24,
    # rounded down) a quarter of that of an integer division.
    expert_TK = topk_idx_TK.to(torch.int32)
    rank_TK = (expert_TK.float() / num_local_experts).floor().to(torch.int32)
    local_expert_TK = expert_TK - rank_TK * num_local_experts

    # A cell is a (rank, token); dropped routes have rank -1, whose cells come first.
    token_T1 = torch.arange(num_tokens, dtype=torch.int32, device=device)[:, None]
    cell_TK = ((rank_TK + 1) * num_tokens + token_T1).long()
    visited = torch.zeros((num_ranks + 1) * num_tokens, dtype=torch.bool, device=device)
    visited.scatter_(0, cell_TK.flatten(), value=True)
    visited[:num_tokens] = False
    row_TK = visited.cumsum(0, dtype=torch.int32).take(cell_TK)
    goes_WT = visited[num_tokens:].view(num_ranks, num_tokens)
    token_S = goes_WT.nonzero(as_tuple=True)[1]

    by_route = top_k <= num_local_experts
    in_row = torch.arange(top_k, dtype=torch.int32, device=device) if by_route else local_expert_TK
    slot_TK = row_TK.long() * num_slots + in_row
    experts = torch.full((1 + len(token_S), num_slots), -1, dtype=torch.int32, device=device)
    experts.view(-1).scatter_(0, slot_TK.flatten(), local_expert_TK.flatten())
    return DispatchPlan(
        layer=layer,
        token_S=token_S,
        send_counts_W=goes_WT.sum(dim=1),
        local_expert_Sm=experts[1:],
        goes_WT=goes_WT,
        slot_TK=slot_TK,
    )
