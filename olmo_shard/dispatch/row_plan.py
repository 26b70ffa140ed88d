"""The plan of a dispatch: which token rows go to which rank.

Shape letters: T tokens, K top-k, W ranks of the expert-parallel group, e local experts,
m = min(K, e) slots of a row, S rows that this rank sends (rows to itself included).

The kernel file of ``plan_ref`` makes the tensors and explains them by an example with numbers.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from olmo_shard.kernels.backend import Backend
from olmo_shard.kernels.dispatch_plan import plan_ref, plan_triton


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """The rows that a rank sends. Each token goes to each rank at most once.

    Triton kernels make lists of static length T x min(K, W), with -1 past the last row.
    """

    layer: int
    """Index of the model's block, for messages and metrics."""
    token_S: Tensor
    """int64 [S]: token of each row, ordered by (destination rank, token)."""
    send_counts_W: Tensor
    """int64 [W]: number of rows for each rank."""
    send_routes_W: Tensor
    """int64 [W]: number of routes to the experts of each rank."""
    local_expert_Sm: Tensor
    """int32 [S, m]: expert of each slot, as numbered on the destination rank; -1 in empty slots."""
    row_WT: Tensor
    """int32 [W, T]: index among the S rows of the row that carries a token to a rank; -1 if the
    token does not go to the rank."""
    slot_TK: Tensor
    """int64 [T, K]: slot of each route in the flattened [1 + S, m]. Row 0 is a bin for dropped
    routes; row 1 + s stands for row s."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.slot_TK.shape[0]

    @cached_property
    def is_sent_WT(self) -> Tensor:  # noqa: N802  (shape letters)
        """Boolean [W, T]: whether a row of the token goes to the rank."""
        return self.row_WT >= 0

    @cached_property
    def send_counts(self) -> list[int]:
        """Number of rows for each rank, as integers. Synchronises with the device."""
        return self.send_counts_W.tolist()

    @cached_property
    def tokens_of_rank(self) -> tuple[Tensor, ...]:
        """``token_S``, split by destination rank."""
        # Lists of static length end with entries of -1, which belong to no rank.
        return self.token_S[: sum(self.send_counts)].split(self.send_counts)

    def weights_by_slot(self, topk_weights_TK: Tensor) -> Tensor:
        """FP32 [S, m]: router weight of each slot, 0 in empty ones."""
        num_rows, num_slots = self.local_expert_Sm.shape
        # Dropped routes write into row 0, which is cut off.
        slots = topk_weights_TK.new_zeros((1 + num_rows) * num_slots)
        slots.scatter_(0, self.slot_TK.flatten(), topk_weights_TK.flatten())
        return slots.view(1 + num_rows, num_slots)[1:]

    def weights_by_route(self, weights_Sm: Tensor) -> Tensor:
        """FP32 [T, K]: weight of each route, 0 for dropped ones. Inverts ``weights_by_slot``."""
        # Dropped routes read from row 0.
        bin_1m = weights_Sm.new_zeros(1, weights_Sm.shape[1])
        return torch.cat([bin_1m, weights_Sm]).take(self.slot_TK)


def make_plan(
    topk_idx_TK: Tensor,
    num_ranks: int,
    num_local_experts: int,
    layer: int = 0,
    backend: Backend = "reference",
) -> DispatchPlan:
    """Make the plan of one MoE layer and micro-batch.

    :param topk_idx_TK: int64 [T, K], distinct global expert ids of each token; -1 for a dropped
        route.
    :param num_ranks: W; rank d holds the experts d x e to (d + 1) x e - 1.
    :param num_local_experts: e.
    :param layer: index of the model's block, for messages and metrics.
    :param backend: ``triton`` makes lists of static length and never waits for the device.
    """
    plan = plan_triton if backend == "triton" else plan_ref
    tensors = plan(topk_idx_TK, num_ranks, num_local_experts)
    return DispatchPlan(layer=layer, **tensors._asdict())


def make_local_plan(topk_idx_TK: Tensor, layer: int) -> DispatchPlan:
    """Make the plan of a single rank: row t is token t, and its slot k is the token's k-th route.

    Every token has a row, with or without a route, so nothing has to be copied.
    """
    num_tokens, top_k = topk_idx_TK.shape
    token_T = torch.arange(num_tokens, device=topk_idx_TK.device)
    # Row 0 of the slots, the bin of dropped routes, stays unused: a dropped route has expert -1.
    slot_TK = torch.arange(top_k, top_k * (num_tokens + 1), device=topk_idx_TK.device)
    return DispatchPlan(
        layer=layer,
        token_S=token_T,
        send_counts_W=token_T.new_full((1,), num_tokens),
        send_routes_W=(topk_idx_TK >= 0).sum()[None],
        local_expert_Sm=topk_idx_TK.to(torch.int32),
        row_WT=token_T.to(torch.int32)[None],
        slot_TK=slot_TK.view(num_tokens, top_k),
    )
