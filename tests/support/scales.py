"""Scales of rounding errors of the model's parts: sums of the absolute values of their terms.

See the note in ``tests/support/close.py``.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SwigluScale(NamedTuple):
    """FP64 scales of the output of routed SwiGLU experts and of its gradients."""

    y_TD: Tensor
    x_TD: Tensor
    weights_TK: Tensor
    w_gate_up_E2FD: Tensor
    w_down_EDF: Tensor


def swiglu_scale(
    x_TD: Tensor,
    idx_TK: Tensor,
    weights_TK: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    dy_TD: Tensor,
) -> SwigluScale:
    """Run the experts, forward and backward, on the absolute values of all operands.

    SiLU is replaced by the identity: ``|silu(z)| <= |z|``, and its slope is at most 1.1. Then no
    term cancels, and each value is the sum of the absolute values of the terms of the value in its
    place.

    :param idx_TK: expert of each route; negative: the route is dropped.
    """
    operands = (x_TD, weights_TK, w_gate_up_E2FD, w_down_EDF)
    x, weights, w_gate_up, w_down = (
        each.detach().double().abs().requires_grad_() for each in operands
    )
    gate_TEF, up_TEF = torch.einsum("efd,td->tef", w_gate_up, x).chunk(2, dim=-1)
    out_TED = torch.einsum("edf,tef->ted", w_down, gate_TEF * up_TEF)
    places = idx_TK.long().clamp(min=0)[:, :, None].expand(-1, -1, x.shape[1])
    kept_TK = (idx_TK >= 0).double()
    y = (out_TED.gather(1, places) * (weights * kept_TK)[:, :, None]).sum(dim=1)
    gradients = torch.autograd.grad(
        y, (x, weights, w_gate_up, w_down), dy_TD.detach().double().abs()
    )
    return SwigluScale(y.detach(), *gradients)
