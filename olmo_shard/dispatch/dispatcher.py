"""The seam between a MoE layer and wherever its experts live.

A layer calls, in this order::

    topk_idx_TK = dispatcher.admit(topk_idx_TK, topk_weights_TK, labelled_T)
    flight = dispatcher.start(x_TD, topk_idx_TK, topk_weights_TK, layer)
    ...                                       # shared experts, while the rows travel
    out_TD = dispatcher.run(flight, experts)

where ``run`` is ``finish``, the experts, ``combine``, unless a transport has a shorter way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from olmo_shard.dispatch import exchange
from olmo_shard.dispatch.capacity import keep_within_capacity
from olmo_shard.dispatch.exchange import DispatchHandle, Transport
from olmo_shard.dispatch.plan import DispatchPlan, make_plan
from olmo_shard.errors import ConfigurationError
from olmo_shard.kernels.backend import Backend
from olmo_shard.kernels.expert_layout import expert_layout
from olmo_shard.kernels.grouped_mlp import MainGrads, grouped_mlp


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
    max_pairs: int
    """Slots that are not empty, at most."""
    handle: DispatchHandle

    def through(
        self, w_gate_up: Tensor, w_down: Tensor, main_grads: MainGrads | None, backend: Backend
    ) -> Tensor:
        """Run the experts: one row for each row, the weighted sum over its local experts, [R, D].

        :param w_gate_up: [e, 2F, D]; :param w_down: [e, D, F].
        """
        max_pairs = self.max_pairs if backend == "triton" else None
        layout = expert_layout(self.local_expert_Rm, len(w_down), max_pairs, backend)
        return grouped_mlp(
            self.x_RD, self.weights_Rm, w_gate_up, w_down, layout, backend, main_grads
        )


Experts = Callable[[Any], Tensor]
"""The experts of a layer on this rank, called once with rows that have a method ``through``."""


class TokenDispatcher(Transport):
    """Sends token rows to their experts and brings one pre-summed row a rank back.

    A transport fills in ``push``, ``pull`` and their two ways back. All layers of a model share one
    dispatcher, since at most one exchange may be outstanding.

    :param num_experts: E, over all ranks of the group.
    :param rank: this rank in the expert-parallel group.
    :param num_ranks: W, ranks of the group.
    :param capacity_factor: limits the routes that an expert takes; null drops none.
    :param backend: what decides which routes an expert takes.
    """

    name: ClassVar[str]
    """As in ``parallel.dispatch``."""
    max_tokens: int | None = None
    """Of a micro-batch; null: any number."""

    def __init__(
        self,
        num_experts: int,
        rank: int,
        num_ranks: int,
        capacity_factor: float | None = None,
        backend: Backend = "reference",
    ) -> None:
        assert num_experts % num_ranks == 0
        self.num_experts, self.rank, self.num_ranks = num_experts, rank, num_ranks
        self.num_local_experts = num_experts // num_ranks
        self.capacity_factor = capacity_factor
        self.backend: Backend = backend

    def admit(self, topk_idx_TK: Tensor, topk_weights_TK: Tensor, labelled_T: Tensor) -> Tensor:
        """Expert ids, with -1 for the routes that capacity drops."""
        if self.capacity_factor is None:
            return topk_idx_TK
        return keep_within_capacity(
            topk_idx_TK,
            topk_weights_TK,
            labelled_T,
            self.num_experts,
            self.capacity_factor,
            self.backend,
        )

    def plan(self, topk_idx_TK: Tensor, layer: int) -> DispatchPlan:
        """The rows that this rank sends."""
        return make_plan(topk_idx_TK, self.num_ranks, self.num_local_experts, layer)

    def start(
        self, x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor, layer: int = 0
    ) -> Flight:
        """Begin to send rows.

        :param x_TD: [T, D] tokens in compute precision.
        :param topk_idx_TK: int64 [T, K] distinct global expert ids, -1 for dropped routes.
        :param topk_weights_TK: FP32 [T, K] router weights.
        :param layer: the model's block, for messages and figures.
        :raises ConfigurationError: where there are more tokens than the transport was made for.
        """
        if self.max_tokens is not None and len(x_TD) > self.max_tokens:
            raise ConfigurationError(
                f"a micro-batch of {len(x_TD)} tokens does not fit a mailbox made for "
                f"{self.max_tokens}: tell parallelize of the largest one (max_tokens)"
            )
        plan = self.plan(topk_idx_TK, layer)
        order = exchange.dispatch_start(x_TD, topk_weights_TK, self, plan)
        counts_W = plan.send_counts_W
        return Flight(order=order, plan=plan, rows_to_others=counts_W.sum() - counts_W[self.rank])

    def run(self, flight: Flight, experts: Experts) -> Tensor:
        """All that follows: wait, run the experts, combine: [T, D].

        :param experts: calls ``through`` of the rows that it gets, with its weights, and returns
            what that returns.
        """
        rows = self.finish(flight)
        return self.combine(experts(rows), rows.handle)

    def finish(self, flight: Flight) -> DispatchedRows:
        """Wait for the rows of this rank's experts."""
        return DispatchedRows(*exchange.dispatch_finish(flight.order, self, flight.plan))

    def combine(self, rows_RD: Tensor, handle: DispatchHandle) -> Tensor:
        """Return one row for each received row to its source; add the rows of a token: [T, D]."""
        return exchange.combine(rows_RD, self, handle)

    def check(self) -> None:
        """See whether an exchange has failed that the host has not waited for; may wait.

        :raises LostPeerError: where one has.
        """

    def close(self) -> None:
        """Free what the transport holds; afterwards it cannot be used."""
