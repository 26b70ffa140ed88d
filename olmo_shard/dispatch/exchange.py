"""The two exchanges of expert parallelism, and their autograd.

[Note: four exchanges] *Outward* moves rows from the ranks of their tokens (sources) to the ranks of
their experts (owners); *back* moves rows to where they came from, at the same positions, where the
rows of a token are added. A layer needs four, the minimum:

    forward   dispatch: outward (rows, router weights, expert numbers)
              combine:  back    (one pre-summed row for each row received)
    backward  combine:  outward (gradient rows)
              dispatch: back    (gradient rows, router-weight gradients)

So the backward of either exchange is the other one, which the table below says in code:

    node             forward      backward
    dispatch_start   push         pull_back
    dispatch_finish  pull         push_back
    combine_start    push_back    pull
    combine_finish   pull_back    push

Each exchange is two autograd nodes, start and finish. Whatever the model computes between them (the
shared experts) is also between them in backward, since the engine runs nodes in reverse order of
creation. A node pair is joined by an empty tensor: it carries no data, only the order.

At most one exchange is outstanding at any time, which every transport asserts. The nodes save no
tensors, so backward never starts a recompute (activation checkpointing) inside an exchange. A
recompute itself ends early, once it has all that backward needs: behind the routed experts, which
save their rows. (Experts that are frozen and get rows without gradient save nothing; in such a
model a recompute could end inside a dispatch, and the next exchange would fail its assertion.)
``expert_side.py`` has nodes that save tensors, and says why they may.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from olmo_shard.dispatch.plan import DispatchPlan


class DeviceCounts(NamedTuple):
    """Rows received from each rank, where the host does not know them."""

    counts_W: Tensor
    """int64, on the device."""
    max_rows: int
    """Of all ranks, at most."""


RecvCounts = list[int] | DeviceCounts
"""Rows received from each rank; a transport takes what it has given."""


def on_host(counts: RecvCounts) -> list[int]:
    assert isinstance(counts, list)
    return counts


@dataclass(frozen=True, kw_only=True)
class DispatchHandle:
    """What combine and the backward need to know of a dispatch."""

    plan: DispatchPlan
    recv_counts: RecvCounts


class Received(NamedTuple):
    """The rows that reached this rank's experts, ordered by (source rank, token)."""

    rows_RD: Tensor
    weights_Rm: Tensor | None
    """FP32: router weight of each slot, 0 in empty ones; null in a backward."""
    local_expert_Rm: Tensor | None
    """int32: local expert of each slot, -1 in empty ones; null in a backward."""
    max_pairs: int
    """Slots that are not empty, at most."""
    recv_counts: RecvCounts


class Transport(ABC):
    """Moves rows. Each push is followed by its pull before the next push."""

    @abstractmethod
    def push(
        self,
        x_TD: Tensor,
        plan: DispatchPlan,
        topk_weights_TK: Tensor | None = None,
        recv_counts: RecvCounts | None = None,
    ) -> None:
        """Start to send each token's row to the ranks of its experts.

        :param x_TD: [T, D] in any memory layout; unchanged until the pull.
        :param topk_weights_TK: router weights, which travel with the rows and the numbers of their
            experts; null sends rows alone.
        :param recv_counts: rows to come from each rank, where a dispatch has told.
        """

    @abstractmethod
    def pull(self) -> Received:
        """Wait for the rows of all ranks, and copy them out."""

    @abstractmethod
    def push_back(
        self, rows_RD: Tensor, handle: DispatchHandle, weights_Rm: Tensor | None = None
    ) -> None:
        """Start to return one row for each received row, and its router-weight gradients.

        :param rows_RD: [R, D] in any memory layout; unchanged until the pull.
        """

    @abstractmethod
    def pull_back(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        """Wait for all ranks; returns the sum of each token's rows [T, D], and weights [S, m]."""


class _DispatchStart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, topk_weights_TK: Tensor, transport: Transport, plan: DispatchPlan
    ) -> Tensor:
        ctx.transport, ctx.plan = transport, plan
        transport.push(x_TD, plan, topk_weights_TK)
        return x_TD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx_TD, dweights_Sm = ctx.transport.pull_back(ctx.plan)
        assert dweights_Sm is not None
        return dx_TD, ctx.plan.weights_by_route(dweights_Sm), None, None


class _DispatchFinish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, order: Tensor, transport: Transport, plan: DispatchPlan
    ) -> tuple[Tensor, Tensor, Tensor, int, DispatchHandle]:
        rows_RD, weights_Rm, local_expert_Rm, max_pairs, recv_counts = transport.pull()
        assert weights_Rm is not None
        assert local_expert_Rm is not None
        ctx.transport = transport
        ctx.handle = DispatchHandle(plan=plan, recv_counts=recv_counts)
        ctx.mark_non_differentiable(local_expert_Rm)
        return rows_RD, weights_Rm, local_expert_Rm, max_pairs, ctx.handle

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        drows_RD, dweights_Rm = grads[0], grads[1]
        ctx.transport.push_back(drows_RD, ctx.handle, dweights_Rm)
        return drows_RD.new_empty(0), None, None


class _CombineStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, transport: Transport, handle: DispatchHandle) -> Tensor:
        ctx.transport = transport
        transport.push_back(rows_RD, handle)
        return rows_RD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transport.pull().rows_RD, None, None


class _CombineFinish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, order: Tensor, transport: Transport, handle: DispatchHandle) -> Tensor:
        ctx.transport, ctx.handle = transport, handle
        return transport.pull_back(handle.plan)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout_TD,) = grads
        handle = ctx.handle
        ctx.transport.push(dout_TD, handle.plan, recv_counts=handle.recv_counts)
        return dout_TD.new_empty(0), None, None


def dispatch_start(
    x_TD: Tensor, topk_weights_TK: Tensor, transport: Transport, plan: DispatchPlan
) -> Tensor:
    return _DispatchStart.apply(x_TD, topk_weights_TK, transport, plan)  # type: ignore[return-value]


def dispatch_finish(
    order: Tensor, transport: Transport, plan: DispatchPlan
) -> tuple[Tensor, Tensor, Tensor, int, DispatchHandle]:
    return _DispatchFinish.apply(order, transport, plan)  # type: ignore[return-value]


def combine(rows_RD: Tensor, transport: Transport, handle: DispatchHandle) -> Tensor:
    order = _CombineStart.apply(rows_RD, transport, handle)
    return combine_finish(order, transport, handle)  # type: ignore[arg-type]


def combine_finish(order: Tensor, transport: Transport, handle: DispatchHandle) -> Tensor:
    return _CombineFinish.apply(order, transport, handle)  # type: ignore[return-value]
