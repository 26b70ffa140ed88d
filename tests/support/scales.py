"""Scales of rounding errors of the model's parts: sums of the absolute values of their terms.

See [Note: bars scale with operands] in ``tests/support/close.py``.

Shape letters: T tokens, K top-k, D model width, F expert width, E experts, R rows, P pairs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.kernels.grouped_gemm import grouped_gemm_ref
from olmo_shard.nn.moe import MoE
from olmo_shard.nn.transformer import Transformer
from tests.support.close import products


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

    :param idx_TK: expert per route; negative for a dropped route.
    """
    operands = (x_TD, weights_TK, w_gate_up_E2FD, w_down_EDF)
    x, weights, w_gate_up, w_down = (x.detach().double().abs().requires_grad_() for x in operands)
    gate_TEF, up_TEF = torch.einsum("efd,td->tef", w_gate_up, x).chunk(2, dim=-1)
    out_TED = torch.einsum("edf,tef->ted", w_down, gate_TEF * up_TEF)
    places = idx_TK.long().clamp(min=0)[:, :, None].expand(-1, -1, x.shape[1])
    kept_TK = (idx_TK >= 0).double()
    y = (out_TED.gather(1, places) * (weights * kept_TK)[:, :, None]).sum(dim=1)
    gradients = torch.autograd.grad(
        y, (x, weights, w_gate_up, w_down), dy_TD.detach().double().abs()
    )
    return SwigluScale(y.detach(), *gradients)


def swiglu_fwd_scale(
    x_RD: Tensor, weight_P: Tensor, w_gate_up: Tensor, row_P: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """FP64 scales of the results of ``swiglu_fwd``."""
    x_PD = _absolute(x_RD)[row_P]
    h_P2F = grouped_gemm_ref(x_PD, _absolute(w_gate_up), offsets, transposed=True)
    gate, up = h_P2F.chunk(2, dim=1)
    return h_P2F, gate * up * _absolute(weight_P)[:, None]


def swiglu_bwd_scale(
    dy_RD: Tensor, weight_P: Tensor, w_down: Tensor, h_P2F: Tensor, row_P: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """FP64 scales of the results of ``swiglu_bwd``."""
    dy_PD, weight_P1 = _absolute(dy_RD)[row_P], _absolute(weight_P)[:, None]
    da_PF = grouped_gemm_ref(dy_PD, _absolute(w_down), offsets, transposed=False)
    gate, up = _absolute(h_P2F).chunk(2, dim=1)
    dh_P2F = torch.cat([da_PF * up, da_PF * gate], dim=1) * weight_P1
    return dh_P2F, gate * up * weight_P1, (da_PF * gate * up).sum(dim=1)


def moe_scale(layer: MoE, x_TD: Tensor, kept_TK: Tensor) -> Tensor:
    """FP64 [T, D]: scale of the output of a mixture-of-experts layer.

    The weight of a route is the exponential of a logit. Its relative error is the error of the
    logit, and the scale of the logit is the sum of the absolute products of token and gate.
    """
    weights_TK = layer.router(x_TD[None]).topk_weights_TK
    experts = layer.experts
    nothing = torch.zeros_like(x_TD)
    routed = swiglu_scale(x_TD, kept_TK, weights_TK, experts.w_gate_up, experts.w_down, nothing)
    logits_T = products(x_TD, layer.router.gate.weight.T).amax(dim=1, keepdim=True)
    scale_TD = routed.y_TD * (1 + logits_T)
    if layer.shared_experts is None:
        return scale_TD
    gate, up, down = (
        _absolute(linear.weight).T
        for linear in (
            layer.shared_experts.w_gate,
            layer.shared_experts.w_up,
            layer.shared_experts.w_down,
        )
    )
    x = _absolute(x_TD)
    return scale_TD + ((x @ gate) * (x @ up)) @ down


def logits_scale(model: Transformer) -> Tensor:
    """FP64 [vocabulary]: scale of a model's logits, for every token.

    The last norm gives each hidden state the length sqrt(d_model). So a logit is at most that
    length times the length of its row of the head. Each layer adds the rounding of one more hidden
    state.
    """
    width, layers = model.config.d_model, model.config.n_layers
    return layers * width**0.5 * model.head_weight().detach().double().norm(dim=1)


def _absolute(x: Tensor) -> Tensor:
    return x.detach().double().abs()
