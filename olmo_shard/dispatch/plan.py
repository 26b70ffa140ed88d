"""Which token rows go to which rank, as the transports read it; ``olmo_shard/kernels/plan.py`` says
with an example what the tensors hold, and makes them.

Shape letters: T tokens, K top-k, W ranks of the expert-parallel group, e local experts,
m = min(K, e) slots of a row, S rows that this rank sends (its own included).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from olmo_shard.kernels.backend import Backend
from olmo_shard.kernels.plan import plan_ref, plan_triton


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """The rows that a rank sends; each token at most once to each rank.

    Triton's kernels make lists of static length, T x min(K, W): what lies past the rows is -1.
    """

    layer: int
    """Block of the model, for messages and figures."""
    token_S: Tensor
    """int64 [S]: token of each row, ordered by (destination rank, token)."""
    send_counts_W: Tensor
    """int64 [W]: rows for each rank."""
    send_routes_W: Tensor
    """int64 [W]: routes to the experts of each rank."""
    local_expert_Sm: Tensor
    """int32 [S, m]: the routes' experts as numbered on the destination rank; -1 in empty slots."""
    row_WT: Tensor
    """int32 [W, T]: the token's row among the S, -1 where none goes to the rank."""
    slot_TK: Tensor
    """int64 [T, K]: slot of each route in the flattened [1 + S, m]; row 0 is a bin for dropped
    routes, row 1 + s is row s."""

    @property
    def num_tokens(self) -> int:
        return self.slot_TK.shape[0]

    @cached_property
    def goes_WT(self) -> Tensor:  # noqa: N802  (shape letters)
        """Boolean [W, T]: whether a row of the token goes to the rank."""
        return self.row_WT >= 0

    @cached_property
    def send_counts(self) -> list[int]:
        """Rows for each rank, on the host."""
        return self.send_counts_W.tolist()

    @cached_property
    def tokens_of_rank(self) -> tuple[Tensor, ...]:
        """``token_S`` by destination rank."""
        return self.token_S[: sum(self.send_counts)].split(self.send_counts)

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
    topk_idx_TK: Tensor,
    num_ranks: int,
    num_local_experts: int,
    layer: int = 0,
    backend: Backend = "reference",
) -> DispatchPlan:
    """Make the plan of one MoE layer and micro-batch.

    :param topk_idx_TK: int64 [T, K], distinct global expert ids of each token; -1 where a route was
        dropped.
    :param num_ranks: W; rank d holds the experts d x e to (d + 1) x e - 1.
    :param num_local_experts: e.
    :param backend: ``triton`` makes lists of static length and never waits for the device.
    """
    plan = plan_triton if backend == "triton" else plan_ref
    tensors = plan(topk_idx_TK, num_ranks, num_local_experts)
    return DispatchPlan(layer=layer, **tensors._asdict())
