"""The SwiGLU feed-forward of all local experts over rows that are read by index.

Shape letters: R rows, D model width, F expert width, e local experts, m slots of a row, P pairs.

For each pair p = (row r, expert i) with router weight w::

    gate, up = w_gate_up[i] @ x[r]           # [F] each
    y[r]    += w_down[i] @ (silu(gate) * up * w)

Example, D = F = e = m = 1: x = 2, w_gate_up = [[1], [3]], w_down = [[5]], w = 0.5 gives
gate = 2, up = 6, silu(2) = 1.7616, y = 5 x 1.7616 x 6 x 0.5 = 26.42.

The weight multiplies the activation, before the down-projection. So the backward needs only the
rows, the up-projection's output and the pairs, and the router's gradient is the dot product of the
activation with its own gradient (SonicMoE, arXiv 2512.14080, has the argument). No expanded [P, D]
copy of the rows exists; the pairs of a row are summed in FP32 in ascending order of experts,
without atomics.

Bytes moved: P x (2D + 3F) x itemsize, weights apart. FLOPs: forward 6 P D F, backward twice that.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_shard.kernels.expert_layout import ExpertLayout


def _groups(layout: ExpertLayout) -> Iterator[tuple[int, slice, Tensor]]:
    """Each expert that has pairs: its number, its pairs, their rows."""
    start = 0
    for expert, count in enumerate(layout.counts):
        if count:
            pairs = slice(start, start + count)
            yield expert, pairs, layout.row_P[pairs]
        start += count


def grouped_mlp_fwd_ref(
    x_RD: Tensor, weight_P: Tensor, w_gate_up: Tensor, w_down: Tensor, layout: ExpertLayout
) -> tuple[Tensor, Tensor]:
    """Forward in plain torch: (y_RD, h_P2F)."""
    h_P2F = x_RD.new_empty(weight_P.shape[0], w_gate_up.shape[1])
    y_RD = torch.zeros(x_RD.shape, dtype=torch.float32, device=x_RD.device)
    for expert, pairs, rows in _groups(layout):
        torch.mm(x_RD[rows], w_gate_up[expert].T, out=h_P2F[pairs])
        gate, up = h_P2F[pairs].chunk(2, dim=1)
        activation = F.silu(gate) * up * weight_P[pairs, None].to(x_RD.dtype)
        y_RD.index_add_(0, rows, (activation @ w_down[expert].T).float())
    return y_RD.to(x_RD.dtype), h_P2F


def grouped_mlp_bwd_ref(
    dy_RD: Tensor,
    x_RD: Tensor,
    weight_P: Tensor,
    h_P2F: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    layout: ExpertLayout,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward in plain torch: gradients of (x_RD, weight_P, w_gate_up, w_down).

    Experts without a row get zero gradients, so that every rank has the same graph.
    """
    dx_RD = torch.zeros(x_RD.shape, dtype=torch.float32, device=x_RD.device)
    dweight_P = torch.zeros_like(weight_P)
    dw_gate_up, dw_down = torch.zeros_like(w_gate_up), torch.zeros_like(w_down)
    for expert, pairs, rows in _groups(layout):
        gate, up = h_P2F[pairs].chunk(2, dim=1)
        weight = weight_P[pairs, None].to(x_RD.dtype)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        dy = dy_RD[rows]
        dscaled = dy @ w_down[expert]
        torch.mm(dy.T, silu * up * weight, out=dw_down[expert])
        dweight_P[pairs] = (dscaled.float() * (silu * up).float()).sum(dim=1)
        dactivation = dscaled * weight
        dgate = dactivation * up * sigmoid * (1 + gate * (1 - sigmoid))
        dh = torch.cat([dgate, dactivation * silu], dim=1)
        torch.mm(dh.T, x_RD[rows], out=dw_gate_up[expert])
        dx_RD.index_add_(0, rows, (dh @ w_gate_up[expert]).float())
    return dx_RD.to(x_RD.dtype), dweight_P, dw_gate_up, dw_down


class GroupedMLPFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        weight_P: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        layout: ExpertLayout,
    ) -> Tensor:
        y_RD, h_P2F = grouped_mlp_fwd_ref(x_RD, weight_P, w_gate_up, w_down, layout)
        ctx.save_for_backward(x_RD, weight_P, h_P2F, w_gate_up, w_down, layout.slot_P, layout.row_P)
        ctx.counts = layout.counts
        return y_RD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_P, h_P2F, w_gate_up, w_down, slot_P, row_P = ctx.saved_tensors
        layout = ExpertLayout(slot_P, row_P, ctx.counts)
        (dy_RD,) = grads
        return *grouped_mlp_bwd_ref(dy_RD, x_RD, weight_P, h_P2F, w_gate_up, w_down, layout), None


def grouped_mlp(
    x_RD: Tensor, weight_P: Tensor, w_gate_up: Tensor, w_down: Tensor, layout: ExpertLayout
) -> Tensor:
    """Run every pair through its expert and sum the pairs of a row.

    :param x_RD: [R, D] rows in compute precision.
    :param weight_P: FP32 [P] router weight of each pair, in the order of ``layout``.
    :param w_gate_up: [e, 2F, D]; rows 0..F-1 are the gate.
    :param w_down: [e, D, F].
    :param layout: the pairs, by :func:`expert_layout`.
    :returns: [R, D]; a row without a pair is zero.
    """
    y_RD = GroupedMLPFunction.apply(x_RD, weight_P, w_gate_up, w_down, layout)
    assert isinstance(y_RD, Tensor)
    return y_RD
