"""A dispatch under way: its autograd nodes, and the experts that wait for its rows.

Shape letters: T tokens, D width, K top-k, m slots of a row, R received rows, F expert width,
e local experts. See [Note: four exchanges] in ``transport.py``.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from olmo_shard.dispatch.fused_experts import run_fused_experts
from olmo_shard.dispatch.pending_combine import PendingCombine, start_combine
from olmo_shard.dispatch.row_plan import DispatchPlan
from olmo_shard.dispatch.transport import PairTransport, ReceivedRows, Transport
from olmo_shard.kernels.backend import Backend
from olmo_shard.kernels.expert_layout import expert_layout
from olmo_shard.kernels.grouped_mlp import MainGrads, grouped_mlp


class PendingDispatch(NamedTuple):
    """Rows that travel to the ranks of their experts.

    A named tuple rather than a dataclass, since FSDP2 looks for tensors in the arguments of a
    module by ``torch.utils._pytree``, which does not look into dataclasses.
    """

    order: Tensor
    """Empty: joins the autograd nodes and carries no data."""
    plan: DispatchPlan
    transport: Transport

    @property
    def send_counts_W(self) -> Tensor:  # noqa: N802  (shape letters)
        """int64 [W]: number of rows that this rank sends to each rank, itself included."""
        return self.plan.send_counts_W

    @property
    def rows_to_others(self) -> Tensor:
        """int64 scalar: number of rows that leave this rank."""
        return self.send_counts_W.sum() - self.send_counts_W[self.transport.rank]

    def run_experts(
        self, w_gate_up: Tensor, w_down: Tensor, main_grads: MainGrads | None, backend: Backend
    ) -> PendingCombine:
        """Wait for the rows, run the local experts, and start to return their outputs.

        :param w_gate_up: [e, 2F, D], gate first.
        :param w_down: [e, D, F].
        :param main_grads: tensors to which backward adds the weights' gradients; ``None`` returns
            the gradients to autograd.
        """
        transport = self.transport
        # 1. The short way, where kernels sum the outputs of a row while they return the row.
        if isinstance(transport, PairTransport):
            assert backend == "triton", "kernels that sum pairs need experts that run by kernels"
            return run_fused_experts(self.order, transport, w_gate_up, w_down, main_grads)
        # 2. Wait for the rows. The finish node of the dispatch is created here.
        rows = self.receive()
        weights_Rm, local_expert_Rm, max_pairs = rows.weights_Rm, rows.local_expert_Rm, None
        assert weights_Rm is not None
        assert local_expert_Rm is not None
        if backend == "triton":  # which allocates for P, while the reference counts for itself
            max_pairs = rows.max_pairs
            if max_pairs is None:
                max_pairs = int((local_expert_Rm >= 0).sum())
        # 3. Sort the pairs of a row and a local expert by expert, and run the experts.
        layout = expert_layout(local_expert_Rm, len(w_down), max_pairs, backend)
        y_RD = grouped_mlp(rows.x_RD, weights_Rm, w_gate_up, w_down, layout, backend, main_grads)
        # 4. One row for each received row travels back.
        return start_combine(y_RD, transport, rows.handle)

    def receive(self) -> ReceivedRows:
        """Wait for the rows of this rank's experts."""
        outputs = _DispatchFinish.apply(self.order, self.transport)
        x_RD, weights_Rm, rows = outputs  # type: ignore[misc]
        # Autograd tracks the outputs of the node, and not the tensors inside ``rows``.
        return replace(rows, x_RD=x_RD, weights_Rm=weights_Rm)


def start_dispatch(
    x_TD: Tensor, topk_weights_TK: Tensor, transport: Transport, plan: DispatchPlan
) -> PendingDispatch:
    """Start to send each token's row to the ranks of its experts.

    :param x_TD: [T, D] tokens in compute precision.
    :param topk_weights_TK: FP32 [T, K] router weights.
    """
    order = _DispatchStart.apply(x_TD, topk_weights_TK, transport, plan)
    return PendingDispatch(order, plan, transport)  # type: ignore[arg-type]


class _DispatchStart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, topk_weights_TK: Tensor, transport: Transport, plan: DispatchPlan
    ) -> Tensor:
        """Send the rows; return the empty tensor that joins the nodes."""
        # On ctx, not by save_for_backward: see [Note: four exchanges] on recomputes.
        ctx.transport, ctx.plan = transport, plan
        transport.send_rows(x_TD, plan, topk_weights_TK)
        return x_TD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of the tokens and of their router weights."""
        dx_TD, dweights_Sm = ctx.transport.receive_returned_rows(ctx.plan)
        assert dweights_Sm is not None
        return dx_TD, ctx.plan.weights_by_route(dweights_Sm), None, None


class _DispatchFinish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, order: Tensor, transport: Transport
    ) -> tuple[Tensor, Tensor, ReceivedRows]:
        """The tensors that have gradients, and all that was received."""
        rows = transport.receive_rows()
        assert rows.weights_Rm is not None
        ctx.transport, ctx.handle = transport, rows.handle
        return rows.x_RD, rows.weights_Rm, rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradients of the received rows back to the tokens."""
        drows_RD, dweights_Rm = grads[0], grads[1]
        ctx.transport.return_rows(drows_RD, ctx.handle, dweights_Rm)
        return drows_RD.new_empty(0), None
