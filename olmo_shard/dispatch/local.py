"""All experts on this rank: rows stay where they are."""

import torch
from torch import Tensor

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.exchange import DispatchHandle, Received, RecvCounts
from olmo_shard.dispatch.plan import DispatchPlan
from olmo_shard.kernels.backend import Backend


class LocalDispatcher(TokenDispatcher):
    """The transport of an expert-parallel group of one, and the reference of the others.

    Nothing is copied: the experts read the tokens themselves, one row each, routes or not.
    """

    name = "local"

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float | None = None,
        backend: Backend = "reference",
    ) -> None:
        super().__init__(num_experts, 0, 1, capacity_factor, backend)
        self._outward: Received | None = None
        self._back: tuple[Tensor, Tensor | None] | None = None

    def plan(self, topk_idx_TK: Tensor, layer: int) -> DispatchPlan:
        return stay_plan(topk_idx_TK, layer)

    def push(
        self,
        x_TD: Tensor,
        plan: DispatchPlan,
        topk_weights_TK: Tensor | None = None,
        recv_counts: RecvCounts | None = None,
    ) -> None:
        self._assert_idle()
        weights, experts = None, None
        if topk_weights_TK is not None:
            weights, experts = topk_weights_TK.detach(), plan.local_expert_Sm
        self._outward = Received(x_TD.detach(), weights, experts, plan.slot_TK.numel(), [len(x_TD)])

    def pull(self) -> Received:
        assert self._outward is not None, "no push is outstanding"
        received, self._outward = self._outward, None
        return received

    def push_back(
        self, rows_RD: Tensor, handle: DispatchHandle, weights_Rm: Tensor | None = None
    ) -> None:
        self._assert_idle()
        self._back = rows_RD.detach(), weights_Rm

    def pull_back(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        assert self._back is not None, "no push_back is outstanding"
        back, self._back = self._back, None
        return back

    def _assert_idle(self) -> None:
        assert self._outward is None, "an exchange is already outstanding"
        assert self._back is None, "an exchange is already outstanding"


def stay_plan(topk_idx_TK: Tensor, layer: int) -> DispatchPlan:
    """Row t is token t, and its slot k the token's k-th route."""
    num_tokens, top_k = topk_idx_TK.shape
    device = topk_idx_TK.device
    token_T = torch.arange(num_tokens, device=device)
    slot_TK = torch.arange(top_k, top_k * (num_tokens + 1), device=device)
    return DispatchPlan(
        layer=layer,
        token_S=token_T,
        send_counts_W=token_T.new_full((1,), num_tokens),
        send_routes_W=(topk_idx_TK >= 0).sum()[None],
        local_expert_Sm=topk_idx_TK.to(torch.int32),
        row_WT=token_T.to(torch.int32)[None],
        slot_TK=slot_TK.view(num_tokens, top_k),
    )
