"""All experts on this rank: rows stay where they are."""

from torch import Tensor

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.exchange import DispatchHandle, Received
from olmo_shard.dispatch.plan import DispatchPlan
from olmo_shard.dispatch.sum_rows import sum_rows


class LocalDispatcher(TokenDispatcher):
    """The transport of an expert-parallel group of one, and the reference of the others."""

    name = "local"

    def __init__(self, num_experts: int, capacity_factor: float | None = None) -> None:
        super().__init__(num_experts, 0, 1, capacity_factor)
        self._outward: Received | None = None
        self._back: tuple[Tensor, Tensor | None] | None = None

    def push(
        self,
        x_TD: Tensor,
        plan: DispatchPlan,
        topk_weights_TK: Tensor | None = None,
        recv_counts: list[int] | None = None,
    ) -> None:
        self._assert_idle()
        weights, experts = None, None
        if topk_weights_TK is not None:
            weights, experts = plan.weights_by_slot(topk_weights_TK), plan.local_expert_Sm
        self._outward = Received(x_TD[plan.token_S], weights, experts, plan.send_counts)

    def pull(self) -> Received:
        assert self._outward is not None, "no push is outstanding"
        received, self._outward = self._outward, None
        return received

    def push_back(
        self, rows_RD: Tensor, handle: DispatchHandle, weights_Rm: Tensor | None = None
    ) -> None:
        self._assert_idle()
        self._back = rows_RD, weights_Rm

    def pull_back(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        assert self._back is not None, "no push_back is outstanding"
        (rows_SD, weights_Sm), self._back = self._back, None
        return sum_rows([rows_SD], plan), weights_Sm

    def _assert_idle(self) -> None:
        assert self._outward is None, "an exchange is already outstanding"
        assert self._back is None, "an exchange is already outstanding"
