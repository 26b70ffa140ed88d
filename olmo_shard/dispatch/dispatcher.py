"""The seam between a MoE layer and wherever its experts live.

A layer calls, in this order::

    topk_idx_TK = dispatcher.admit(topk_idx_TK, topk_weights_TK, labelled_T)
    flight = dispatcher.start(x_TD, topk_idx_TK, topk_weights_TK, layer)
    ...                                       # shared experts, while the rows travel
    rows = dispatcher.finish(flight)
    out_TD = dispatcher.combine(experts(rows), rows.handle)
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from olmo_shard.dispatch import exchange
from olmo_shard.dispatch.capacity import keep_within_capacity
from olmo_shard.dispatch.exchange import DispatchHandle, Transport
from olmo_shard.dispatch.plan import DispatchPlan, make_plan


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A dispatch under way."""

    order: Tensor
    """Empty: it carries the order of the autograd nodes, and no data."""
    plan: DispatchPlan
    rows_to_others: Tensor
    """int64 scalar: rows that leave this rank."""


class DispatchedRows(NamedTuple):
    """The rows that reached this rank's experts, ordered by (source rank, token)."""

    x_RD: Tensor
    weights_Rm: Tensor
    """FP32 [R, m]: router weight of each slot, 0 in empty ones."""
    local_expert_Rm: Tensor
    """int32 [R, m]: local expert of each slot, -1 in empty ones."""
    handle: DispatchHandle


class TokenDispatcher(Transport):
    """Sends token rows to their experts and brings one pre-summed row a rank back.

    A transport fills in ``push``, ``pull`` and their two ways back. All layers of a model share one
    dispatcher, since at most one exchange may be outstanding.

    :param num_experts: E, over all ranks of the group.
    :param rank: this rank in the expert-parallel group.
    :param num_ranks: W, ranks of the group.
    :param capacity_factor: limits the routes that an expert takes; null drops none.
    """

    name: ClassVar[str]
    """As in ``parallel.dispatch``."""

    def __init__(
        self, num_experts: int, rank: int, num_ranks: int, capacity_factor: float | None = None
    ) -> None:
        assert num_experts % num_ranks == 0
        self.num_experts, self.rank, self.num_ranks = num_experts, rank, num_ranks
        self.num_local_experts = num_experts // num_ranks
        self.capacity_factor = capacity_factor

    def admit(self, topk_idx_TK: Tensor, topk_weights_TK: Tensor, labelled_T: Tensor) -> Tensor:
        """Expert ids, with -1 for the routes that capacity drops."""
        if self.capacity_factor is None:
            return topk_idx_TK
        return keep_within_capacity(
            topk_idx_TK, topk_weights_TK, labelled_T, self.num_experts, self.capacity_factor
        )

    def start(
        self, x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor, layer: int = 0
    ) -> Flight:
        """Begin to send rows.

        :param x_TD: [T, D] tokens in compute precision.
        :param topk_idx_TK: int64 [T, K] distinct global expert ids, -1 for dropped routes.
        :param topk_weights_TK: FP32 [T, K] router weights.
        :param layer: the model's block, for messages and figures.
        """
        plan = make_plan(topk_idx_TK, self.num_ranks, self.num_local_experts, layer)
        order = exchange.dispatch_start(x_TD, topk_weights_TK, self, plan)
        counts_W = plan.send_counts_W
        return Flight(order=order, plan=plan, rows_to_others=counts_W.sum() - counts_W[self.rank])

    def finish(self, flight: Flight) -> DispatchedRows:
        """Wait for the rows of this rank's experts."""
        return DispatchedRows(*exchange.dispatch_finish(flight.order, self, flight.plan))

    def combine(self, rows_RD: Tensor, handle: DispatchHandle) -> Tensor:
        """Return one row for each received row to its source; add the rows of a token: [T, D]."""
        return exchange.combine(rows_RD, self, handle)

    def close(self) -> None:
        """Free what the transport holds; afterwards it cannot be used."""
