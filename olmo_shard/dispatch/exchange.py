"""The two exchanges of expert parallelism, and their autograd.

[Note: four exchanges] *Outward* moves rows from the ranks of their tokens (sources) to the ranks of
their experts (owners); *inward* moves rows back to where they came from, at the same positions. A
layer needs four, the minimum:

    forward   dispatch: outward (rows, router weights, expert numbers)
              combine:  inward  (one pre-summed row for each row received)
    backward  combine:  outward (gradient rows)
              dispatch: inward  (gradient rows, router-weight gradients)

Each exchange is two autograd nodes, start and finish. Whatever the model computes between them (the
shared experts) is also between them in backward, since the engine runs nodes in reverse order of
creation. A node pair is joined by an empty tensor: it carries no data, only the order. The nodes
save no tensors, so a recompute (activation checkpointing) never falls inside an exchange: at most
one is outstanding at any time, which every dispatcher asserts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from olmo_shard.dispatch.plan import DispatchPlan


@dataclass(frozen=True, kw_only=True)
class DispatchHandle:
    """What combine and the backward need to know of a dispatch."""

    plan: DispatchPlan
    send_counts: list[int]
    """Rows sent to each rank."""
    recv_counts: list[int]
    """Rows received from each rank."""


class Transport(ABC):
    """Moves rows; at most one exchange is outstanding."""

    @abstractmethod
    def send(self, payload: tuple[Tensor, ...], handle: DispatchHandle, outward: bool) -> None:
        """Start to send the rows of all payload tensors (equal first dimension, contiguous)."""

    @abstractmethod
    def receive(self) -> tuple[Tensor, ...]:
        """Wait for the rows of all ranks, in rank order: one tensor for each payload tensor."""


class _DispatchStart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        topk_weights_TK: Tensor,
        transport: Transport,
        handle: DispatchHandle,
    ) -> Tensor:
        ctx.transport, ctx.handle = transport, handle
        plan = handle.plan
        weights = topk_weights_TK.flatten()[plan.route_Sm.clamp(min=0)]
        weights_Sm = torch.where(plan.route_Sm >= 0, weights, 0)
        transport.send((x_TD[plan.token_S], weights_Sm, plan.local_expert_Sm), handle, outward=True)
        return x_TD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan: DispatchPlan = ctx.handle.plan
        drows_SD, dweights_Sm = ctx.transport.receive()
        dx_TD = sum_rows(drows_SD, ctx.handle)
        # Every route has one slot; empty slots (-1) go to one element more, which is cut off.
        num_routes = plan.num_tokens * plan.top_k
        dweights = dweights_Sm.new_zeros(num_routes + 1)
        dweights[plan.route_Sm.remainder(num_routes + 1)] = dweights_Sm
        dweights_TK = dweights[:num_routes].view(plan.num_tokens, plan.top_k)
        return dx_TD, dweights_TK, None, None


class _DispatchFinish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, order: Tensor, transport: Transport, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.transport, ctx.handle = transport, handle
        rows_RD, weights_Rm, local_expert_Rm = transport.receive()
        ctx.mark_non_differentiable(local_expert_Rm)
        return rows_RD, weights_Rm, local_expert_Rm

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        drows_RD, dweights_Rm = grads[0].contiguous(), grads[1].contiguous()
        ctx.transport.send((drows_RD, dweights_Rm), ctx.handle, outward=False)
        return drows_RD.new_empty(0), None, None


class _CombineStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, transport: Transport, handle: DispatchHandle) -> Tensor:
        ctx.transport = transport
        transport.send((rows_RD.contiguous(),), handle, outward=False)
        return rows_RD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (drows_RD,) = ctx.transport.receive()
        return drows_RD, None, None


class _CombineFinish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, order: Tensor, transport: Transport, handle: DispatchHandle) -> Tensor:
        ctx.transport, ctx.handle = transport, handle
        (rows_SD,) = transport.receive()
        return sum_rows(rows_SD, handle)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout_TD,) = grads
        ctx.transport.send((dout_TD[ctx.handle.plan.token_S],), ctx.handle, outward=True)
        return dout_TD.new_empty(0), None, None


def sum_rows(rows_SD: Tensor, handle: DispatchHandle) -> Tensor:
    """Add the rows of a token, at most one a rank, in FP32 and in rank order."""
    plan = handle.plan
    shape = (plan.num_tokens, rows_SD.shape[1])
    out_TD = torch.zeros(shape, dtype=torch.float32, device=rows_SD.device)
    rows_of_rank = rows_SD.float().split(handle.send_counts)
    for tokens, rows in zip(plan.token_S.split(handle.send_counts), rows_of_rank, strict=True):
        out_TD.index_add_(0, tokens, rows)
    return out_TD.to(rows_SD.dtype)


def dispatch_start(
    x_TD: Tensor, topk_weights_TK: Tensor, transport: Transport, handle: DispatchHandle
) -> Tensor:
    return _DispatchStart.apply(x_TD, topk_weights_TK, transport, handle)  # type: ignore[return-value]


def dispatch_finish(
    order: Tensor, transport: Transport, handle: DispatchHandle
) -> tuple[Tensor, Tensor, Tensor]:
    return _DispatchFinish.apply(order, transport, handle)  # type: ignore[return-value]


def combine(rows_RD: Tensor, transport: Transport, handle: DispatchHandle) -> Tensor:
    order = _CombineStart.apply(rows_RD, transport, handle)
    return _CombineFinish.apply(order, transport, handle)  # type: ignore[return-value]
