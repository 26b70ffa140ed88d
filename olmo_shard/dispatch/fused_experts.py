"""Experts fused with the exchanges around them, for transports whose kernels sum a row's pairs.

Shape letters: D width, F expert width, R received rows, m slots of a row, P pairs of a row and a
local expert.

The expert outputs of a row are summed while the row is returned, so they never exist as a tensor
with one row for each received row. The autograd nodes of [Note: four exchanges] in ``transport.py``
would have to pass such a tensor on. Two other nodes therefore hold the experts as well::

    node                       forward                         backward
    receive and up-project     receive_rows, up-projection     experts, return_pairs
    down-project and return    down-projection, return_pairs   receive_rows

The two nodes share a ``_NodeHandoff``, since autograd would want a gradient for each tensor that
one node hands to the other::

    forward    receive and up-project   -- activations, handle -->   down-project and return
    backward   receive and up-project   <-- dy_RD ----------------   down-project and return

Only the first node saves tensors. It reads them after ``receive_rows`` of the backward pass and
before ``return_pairs``, so a recompute that they start falls between two exchanges. The recompute
stops after the first node, so it computes no down-projection.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from olmo_shard.dispatch.pending_combine import PendingCombine
from olmo_shard.dispatch.transport import DispatchHandle, PairTransport
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


class _Activations(NamedTuple):
    """Input of the down-projection, and the pairs that it belongs to."""

    a_PF: Tensor
    offsets: Tensor
    pair_Rm: Tensor


class _NodeHandoff:
    """What the two nodes of one forward and its backward hand to each other."""

    handle: DispatchHandle
    activations: _Activations | None = None
    """Handed from the first node's forward to the second node's forward."""
    dy_RD: Tensor | None = None
    """Handed from the second node's backward to the first node's backward."""


def run_fused_experts(
    order: Tensor,
    transport: PairTransport,
    w_gate_up: Tensor,
    w_down: Tensor,
    main_grads: MainGrads | None,
) -> PendingCombine:
    """Wait for the rows, run the local experts, and start to return their outputs.

    :param order: empty; joins the node that started the dispatch.
    :param w_gate_up: [e, 2F, D]; ``w_down``: [e, D, F], for e local experts.
    :param main_grads: tensors to which backward adds the weights' gradients; ``None`` returns the
        gradients to autograd.
    """
    handoff = _NodeHandoff()
    received = _ReceiveAndUpProject.apply(order, transport, handoff, w_gate_up, w_down, main_grads)
    # The down-projection must run here, while FSDP still has the weights gathered.
    returned = _DownProjectAndReturn.apply(received, transport, handoff, w_down.detach())
    return PendingCombine(returned, transport, handoff.handle)  # type: ignore[arg-type]


class _ReceiveAndUpProject(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        order: Tensor,
        transport: PairTransport,
        handoff: _NodeHandoff,
        w_gate_up: Tensor,
        w_down: Tensor,
        main_grads: MainGrads | None,
    ) -> Tensor:
        """Wait for the rows and run the first half of the experts."""
        rows = transport.receive_rows()
        assert rows.weights_Rm is not None
        assert rows.local_expert_Rm is not None
        layout = expert_layout(rows.local_expert_Rm, len(w_down), rows.max_pairs, "triton")
        weight_P = weight_of_pairs(rows.weights_Rm, layout.slot_P)
        h_P2F, a_PF = swiglu_fwd(rows.x_RD, weight_P, w_gate_up, layout.row_P, layout.offsets)
        # Handed on by attribute. As an output of this node, the activations would get a gradient.
        handoff.activations = _Activations(a_PF, layout.offsets, layout.pair_Rm)
        handoff.handle = rows.handle
        ctx.transport, ctx.handoff, ctx.main_grads = transport, handoff, main_grads
        saved = Saved(rows.x_RD, weight_P, h_P2F, w_gate_up, w_down, layout.row_P, layout.offsets)
        ctx.save_for_backward(*saved, layout.pair_Rm)
        return order.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward of the experts, and return the gradient rows to the tokens."""
        handoff = ctx.handoff
        dy_RD, handoff.dy_RD = handoff.dy_RD, None
        assert dy_RD is not None
        # May start a recompute: the node before has received, and nothing is outstanding.
        *tensors, pair_Rm = ctx.saved_tensors
        saved = Saved(*tensors)
        # With main gradients the kernels add in place, and autograd gets no gradient.
        add = ctx.main_grads is not None
        weights = saved.w_gate_up, saved.w_down
        dweights = ctx.main_grads if add else tuple(torch.empty_like(w) for w in weights)
        dx_PD, dweight_P = grouped_mlp_bwd(dy_RD, saved, *dweights, add=add)
        weight_grads = (None, None) if add else dweights
        if not ctx.needs_input_grad[0]:
            # No rank needs input gradients then, so none would receive them.
            return None, None, None, *weight_grads, None
        dweights_Rm = weight_of_slots(dweight_P, pair_Rm)
        ctx.transport.return_pairs(dx_PD, pair_Rm, handoff.handle, dweights_Rm)
        return dy_RD.new_empty(0), None, None, *weight_grads, None


class _DownProjectAndReturn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, order: Tensor, transport: PairTransport, handoff: _NodeHandoff, w_down: Tensor
    ) -> Tensor:
        """Run the second half of the experts, and return the outputs."""
        ctx.transport, ctx.handoff = transport, handoff
        # Taken out, so that the activations are freed when the rows have left.
        activations, handoff.activations = handoff.activations, None
        assert activations is not None
        a_PF, offsets, pair_Rm = activations
        y_PD = grouped_gemm(a_PF, w_down, offsets, transposed=True)
        transport.return_pairs(y_PD, pair_Rm, handoff.handle)
        return order.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of the returned rows, and hand them to the first node."""
        ctx.handoff.dy_RD = ctx.transport.receive_rows().x_RD
        return grads[0].new_empty(0), None, None, None
