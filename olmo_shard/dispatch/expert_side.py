"""Experts between two exchanges, for transports that sum the pairs of a row on their way.

The nodes are those of [Note: four exchanges] in ``exchange.py``, but what lies between exchanges
belongs to them, since no tensor with one row each exists there::

    node            forward                            backward
    expert_side     pull, up-projection                experts, push_pairs_back
    pairs_start     down-projection, push_pairs_back   pull

The second node hands its gradient rows to the first by way of a ``_Between``. Only the first saves
tensors: it asks for them behind the pull and in front of the push, so a recompute falls between
exchanges. It ends behind the first node, and so computes no down-projection.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from olmo_shard.dispatch.dispatcher import Experts, Flight
from olmo_shard.dispatch.exchange import DispatchHandle, Received, combine_finish
from olmo_shard.dispatch.plan import DispatchPlan
from olmo_shard.kernels.expert_layout import expert_layout
from olmo_shard.kernels.grouped_gemm import grouped_gemm
from olmo_shard.kernels.grouped_mlp import (
    MainGrads,
    Saved,
    grouped_mlp_bwd,
    weight_of_pairs,
    weight_of_slots,
)
from olmo_shard.kernels.grouped_swiglu import swiglu_fwd


class PairTransport(Protocol):
    """What it takes of a transport."""

    def pull(self) -> Received: ...

    def push_pairs_back(
        self,
        y_PD: Tensor,
        pair_Rm: Tensor,
        handle: DispatchHandle,
        weights_Rm: Tensor | None = None,
    ) -> None: ...


class _Between:
    """What the two nodes of one forward and its backward hand to each other."""

    handle: DispatchHandle
    activations: "_Activations | None" = None
    """From the first node's forward to the second's."""
    dy_RD: Tensor | None = None
    """From the second node's backward to the first's."""


class _Activations(NamedTuple):
    a_PF: Tensor
    offsets: Tensor
    pair_Rm: Tensor


class AwaitedRows(NamedTuple):
    """Rows that are under way to this rank's experts."""

    order: Tensor
    plan: DispatchPlan
    transport: PairTransport
    between: _Between

    def through(
        self, w_gate_up: Tensor, w_down: Tensor, main_grads: MainGrads | None, backend: str
    ) -> Tensor:
        """Wait for them, run the experts, send on; returns the order of what follows."""
        assert backend == "triton"
        order = _ExpertSide.apply(*self, w_gate_up, w_down, main_grads)
        # Here, while FSDP still has the weights gathered.
        return _PairsStart.apply(order, self.transport, self.between, w_down.detach())  # type: ignore[return-value]


def run_on_expert_side(flight: Flight, experts: Experts, transport: Any) -> Tensor:
    """From rows under way to the sum of each token's rows."""
    between = _Between()
    order = experts(AwaitedRows(flight.order, flight.plan, transport, between))
    return combine_finish(order, transport, between.handle)


class _ExpertSide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        order: Tensor,
        plan: DispatchPlan,
        transport: PairTransport,
        between: _Between,
        w_gate_up: Tensor,
        w_down: Tensor,
        main_grads: MainGrads | None,
    ) -> Tensor:
        x_RD, weights_Rm, local_expert_Rm, max_pairs, recv_counts = transport.pull()
        assert weights_Rm is not None
        assert local_expert_Rm is not None
        layout = expert_layout(local_expert_Rm, len(w_down), max_pairs, "triton")
        weight_P = weight_of_pairs(weights_Rm, layout.slot_P)
        h_P2F, a_PF = swiglu_fwd(x_RD, weight_P, w_gate_up, layout.row_P, layout.offsets)
        between.activations = _Activations(a_PF, layout.offsets, layout.pair_Rm)
        between.handle = DispatchHandle(plan=plan, recv_counts=recv_counts)
        ctx.transport, ctx.between, ctx.main_grads = transport, between, main_grads
        saved = Saved(x_RD, weight_P, h_P2F, w_gate_up, w_down, layout.row_P, layout.offsets)
        ctx.save_for_backward(*saved, layout.pair_Rm)
        return order.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        between = ctx.between
        dy_RD, between.dy_RD = between.dy_RD, None
        assert dy_RD is not None
        *tensors, pair_Rm = ctx.saved_tensors
        saved = Saved(*tensors)
        mains = ctx.main_grads
        add = mains is not None
        weights = saved.w_gate_up, saved.w_down
        dweights = mains if add else tuple(torch.empty_like(each) for each in weights)
        dx_PD, dweight_P = grouped_mlp_bwd(dy_RD, saved, *dweights, add=add)
        returned = (None, None) if add else dweights
        if not ctx.needs_input_grad[0]:  # nor on any other rank: nobody would pull
            return None, None, None, None, *returned, None
        dweights_Rm = weight_of_slots(dweight_P, pair_Rm)
        ctx.transport.push_pairs_back(dx_PD, pair_Rm, between.handle, dweights_Rm)
        return dy_RD.new_empty(0), None, None, None, *returned, None


class _PairsStart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, order: Tensor, transport: PairTransport, between: _Between, w_down: Tensor
    ) -> Tensor:
        ctx.transport, ctx.between = transport, between
        activations, between.activations = between.activations, None
        assert activations is not None
        a_PF, offsets, pair_Rm = activations
        y_PD = grouped_gemm(a_PF, w_down, offsets, transposed=True)
        transport.push_pairs_back(y_PD, pair_Rm, between.handle)
        return order.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.between.dy_RD = ctx.transport.pull().rows_RD
        return grads[0].new_empty(0), None, None, None
