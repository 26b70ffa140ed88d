"""The seam between a MoE layer and wherever its experts live.

A layer calls, in this order::

    flight = dispatcher.start(x_TD, topk_idx_TK, topk_weights_TK)
    ...                                       # shared experts, while the rows travel
    rows = dispatcher.finish(flight)
    out_TD = dispatcher.combine(experts(rows), rows.handle)
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.dispatch import exchange
from olmo_shard.dispatch.exchange import DispatchHandle, Transport
from olmo_shard.dispatch.plan import make_plan


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A dispatch under way."""

    order: Tensor
    """Empty: it carries the order of the autograd nodes, and no data."""
    handle: DispatchHandle


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

    A transport fills in ``send``, ``receive`` and ``exchange_counts``.

    :param num_experts: E, over all ranks of the group.
    :param num_ranks: W, ranks of the expert-parallel group.
    """

    def __init__(self, num_experts: int, num_ranks: int) -> None:
        assert num_experts % num_ranks == 0
        self.num_ranks = num_ranks
        self.num_local_experts = num_experts // num_ranks

    def start(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor) -> Flight:
        """Begin to send rows.

        :param x_TD: [T, D] tokens in compute precision.
        :param topk_idx_TK: int64 [T, K] distinct global expert ids.
        :param topk_weights_TK: FP32 [T, K] router weights.
        """
        plan = make_plan(topk_idx_TK, self.num_ranks, self.num_local_experts)
        recv_counts_W = self.exchange_counts(plan.send_counts_W)
        send_counts, recv_counts = torch.stack([plan.send_counts_W, recv_counts_W]).tolist()
        handle = DispatchHandle(plan=plan, send_counts=send_counts, recv_counts=recv_counts)
        order = exchange.dispatch_start(x_TD, topk_weights_TK, self, handle)
        return Flight(order=order, handle=handle)

    def finish(self, flight: Flight) -> DispatchedRows:
        """Wait for the rows of this rank's experts."""
        received = exchange.dispatch_finish(flight.order, self, flight.handle)
        return DispatchedRows(*received, flight.handle)

    def combine(self, rows_RD: Tensor, handle: DispatchHandle) -> Tensor:
        """Return one row for each received row to its source; add the rows of a token: [T, D]."""
        return exchange.combine(rows_RD, self, handle)

    @abstractmethod
    def exchange_counts(self, send_counts_W: Tensor) -> Tensor:
        """Rows that each rank sends to this one, int64 [W]."""
