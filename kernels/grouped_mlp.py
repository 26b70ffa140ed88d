"""The routed experts as one operator: the SwiGLU feed-forward of all local experts.

Shape letters: R rows, D model width, F expert width, e local experts, m slots of a row, P pairs.

For each pair p = (row r, expert i) with router weight w::

    gate, up = w_gate_up[i] @ x[r]           # [F] each
    y[r]    += w_down[i] @ (silu(gate) * up * w)

Rows are read by index.

Example, D = F = e = m = 1: x = 2, w_gate_up = [[1], [3]], w_down = [[5]], w = 0.5 gives
gate = 2, up = 6, silu(2) = 1.7616, y = 5 x 1.7616 x 6 x 0.5 = 26.42.

The router weight multiplies the activation, before the down-projection. So the backward needs only
the rows, the output of the up-projection and the pairs. The gradient of a router weight is the dot
product of the activation and the activation's gradient (SonicMoE, arXiv 2512.14080, derives it). No
expanded [P, D] copy of the rows exists. The pairs of a row are summed in FP32 in a fixed order,
without atomics.

Elements moved, without the weights: forward 2 R D + P (4F + 2D), backward 4 R D + P (10F + 2D).
FLOPs: forward 6 P D F, backward 12 P D F.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from olmo_shard.kernels.backend import Backend
from olmo_shard.kernels.expert_layout import ExpertLayout
from olmo_shard.kernels.grouped_gemm import grouped_gemm
from olmo_shard.kernels.grouped_swiglu import swiglu_bwd, swiglu_bwd_ref, swiglu_fwd, swiglu_fwd_ref
from olmo_shard.kernels.grouped_tiles import groups
from olmo_shard.kernels.grouped_wgrad import grouped_wgrad, grouped_wgrad_ref
from olmo_shard.kernels.sum_pairs import sum_pairs


class MainGrads(NamedTuple):
    """The FP32 tensors to which backward adds the weights' gradients.

    Both are contiguous. See [Note: main gradients] in ``grouped_wgrad.py``.
    """

    w_gate_up: Tensor
    """FP32 [e, 2F, D]."""
    w_down: Tensor
    """FP32 [e, D, F]."""


class Saved(NamedTuple):
    """The tensors of a forward that backward needs."""

    x_RD: Tensor
    """[R, D]: rows in compute precision."""
    weight_P: Tensor
    """FP32 [P]: router weight of each pair."""
    h_P2F: Tensor
    """[P, 2F]: output of the up-projection."""
    w_gate_up: Tensor
    """[e, 2F, D]."""
    w_down: Tensor
    """[e, D, F]."""
    row_P: Tensor
    """int64 [P]: row of each pair."""
    offsets: Tensor
    """int32 [e + 1]: first pair of each expert, and the end of the last one's."""


def weight_of_pairs(weights_Rm: Tensor, slot_P: Tensor) -> Tensor:
    """Router weight of each pair, FP32 [P]; arbitrary values after the last pair.

    :param weights_Rm: FP32 [R, m]: router weight of each slot.
    :param slot_P: int64 [P]: slot of each pair.
    """
    return weights_Rm.flatten()[slot_P.clamp(min=0)]


def weight_of_slots(weight_P: Tensor, pair_Rm: Tensor) -> Tensor:
    """Value of each slot, FP32 [R, m]: the inverse of ``weight_of_pairs``, with 0 in empty slots.

    :param weight_P: FP32 [P]: value of each pair.
    :param pair_Rm: int32 [R, m]: pair of each slot, -1 in empty slots.
    """
    if len(weight_P) == 0:
        return weight_P.new_zeros(pair_Rm.shape)
    return torch.where(pair_Rm < 0, 0, weight_P[pair_Rm.clamp(min=0)])


def grouped_mlp_fwd(
    x_RD: Tensor,
    weight_P: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    row_P: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor]:
    """Forward by Triton. Returns (y_PD, h_P2F); the caller sums the pairs of each row."""
    h_P2F, a_PF = swiglu_fwd(x_RD, weight_P, w_gate_up, row_P, offsets)
    return grouped_gemm(a_PF, w_down, offsets, transposed=True), h_P2F


def grouped_mlp_bwd(
    dy_RD: Tensor, saved: Saved, dw_gate_up: Tensor, dw_down: Tensor, *, add: bool
) -> tuple[Tensor, Tensor]:
    """Backward by Triton. Returns (dx_PD, dweight_P); the caller sums the pairs of each row.

    :param dy_RD: [R, D]: gradient of the experts' output.
    :param saved: tensors of the forward.
    :param dw_gate_up: [e, 2F, D]: receives the gradient of ``w_gate_up``.
    :param dw_down: [e, D, F]: receives the gradient of ``w_down``.
    :param add: whether these gradients are added, and not written.
    """
    x_RD, weight_P, h_P2F, w_gate_up, w_down, row_P, offsets = saved
    dh_P2F, a_PF, dweight_P = swiglu_bwd(dy_RD, weight_P, w_down, h_P2F, row_P, offsets)
    grouped_wgrad(dy_RD, a_PF, offsets, dw_down, left_index_P=row_P, add=add)
    grouped_wgrad(dh_P2F, x_RD, offsets, dw_gate_up, right_index_P=row_P, add=add)
    return grouped_gemm(dh_P2F, w_gate_up, offsets, transposed=False), dweight_P


def grouped_mlp_fwd_ref(
    x_RD: Tensor,
    weight_P: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    row_P: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor]:
    """Forward in plain torch. Returns (y_RD, h_P2F); the pairs of a row are summed by expert."""
    h_P2F, a_PF = swiglu_fwd_ref(x_RD, weight_P, w_gate_up, row_P, offsets)
    y_RD = torch.zeros(x_RD.shape, dtype=torch.float32, device=x_RD.device)
    for expert, pairs in groups(offsets):
        y_RD.index_add_(0, row_P[pairs], (a_PF[pairs] @ w_down[expert].T).float())
    return y_RD.to(x_RD.dtype), h_P2F


def grouped_mlp_bwd_ref(
    dy_RD: Tensor, saved: Saved, dw_gate_up: Tensor, dw_down: Tensor, *, add: bool
) -> tuple[Tensor, Tensor]:
    """Backward in plain torch. Returns (dx_RD, dweight_P); arguments as for ``grouped_mlp_bwd``."""
    x_RD, weight_P, h_P2F, w_gate_up, w_down, row_P, offsets = saved
    dh_P2F, a_PF, dweight_P = swiglu_bwd_ref(dy_RD, weight_P, w_down, h_P2F, row_P, offsets)
    grouped_wgrad_ref(dy_RD, a_PF, offsets, dw_down, left_index_P=row_P, add=add)
    grouped_wgrad_ref(dh_P2F, x_RD, offsets, dw_gate_up, right_index_P=row_P, add=add)
    dx_RD = torch.zeros(x_RD.shape, dtype=torch.float32, device=x_RD.device)
    for expert, pairs in groups(offsets):
        dx_RD.index_add_(0, row_P[pairs], (dh_P2F[pairs] @ w_gate_up[expert]).float())
    return dx_RD.to(x_RD.dtype), dweight_P


@torch.library.custom_op("olmo_shard::grouped_mlp", mutates_args=())
def _grouped_mlp_op(
    x_RD: Tensor,
    weights_Rm: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    slot_P: Tensor,
    row_P: Tensor,
    offsets: Tensor,
    pair_Rm: Tensor,
    main_gate_up: Tensor | None,
    main_down: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return (y_RD, h_P2F). Only the backward uses the main gradients."""
    x_RD, weight_P = x_RD.contiguous(), weight_of_pairs(weights_Rm, slot_P)
    if backend == "reference":
        return grouped_mlp_fwd_ref(x_RD, weight_P, w_gate_up, w_down, row_P, offsets)
    y_PD, h_P2F = grouped_mlp_fwd(x_RD, weight_P, w_gate_up, w_down, row_P, offsets)
    return sum_pairs(y_PD, pair_Rm), h_P2F


@_grouped_mlp_op.register_fake
def _(x_RD: Tensor, weights_Rm: Tensor, w_gate_up: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    slot_P = rest[1]
    return torch.empty_like(x_RD).contiguous(), x_RD.new_empty(len(slot_P), w_gate_up.shape[1])


@torch.library.custom_op("olmo_shard::grouped_mlp_bwd", mutates_args=())
def _grouped_mlp_bwd_op(
    dy_RD: Tensor,
    x_RD: Tensor,
    weights_Rm: Tensor,
    h_P2F: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    slot_P: Tensor,
    row_P: Tensor,
    offsets: Tensor,
    pair_Rm: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of (x_RD, weights_Rm, w_gate_up, w_down)."""
    dw_gate_up, dw_down = torch.empty_like(w_gate_up), torch.empty_like(w_down)
    weight_P = weight_of_pairs(weights_Rm, slot_P)
    saved = Saved(x_RD.contiguous(), weight_P, h_P2F, w_gate_up, w_down, row_P, offsets)
    dx_RD, dweights_Rm = _backward(dy_RD, saved, pair_Rm, dw_gate_up, dw_down, backend, add=False)
    return dx_RD, dweights_Rm, dw_gate_up, dw_down


@_grouped_mlp_bwd_op.register_fake
def _(
    dy_RD: Tensor,
    x_RD: Tensor,
    weights_Rm: Tensor,
    h_P2F: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    written = x_RD, weights_Rm, w_gate_up, w_down
    return tuple(torch.empty_like(operand).contiguous() for operand in written)  # type: ignore[return-value]


@torch.library.custom_op(
    "olmo_shard::grouped_mlp_bwd_into", mutates_args=("main_gate_up", "main_down")
)
def _grouped_mlp_bwd_into_op(
    dy_RD: Tensor,
    x_RD: Tensor,
    weights_Rm: Tensor,
    h_P2F: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    slot_P: Tensor,
    row_P: Tensor,
    offsets: Tensor,
    pair_Rm: Tensor,
    main_gate_up: Tensor,
    main_down: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of (x_RD, weights_Rm); those of the weights are added to the main gradients."""
    weight_P = weight_of_pairs(weights_Rm, slot_P)
    saved = Saved(x_RD.contiguous(), weight_P, h_P2F, w_gate_up, w_down, row_P, offsets)
    return _backward(dy_RD, saved, pair_Rm, main_gate_up, main_down, backend, add=True)


@_grouped_mlp_bwd_into_op.register_fake
def _(dy_RD: Tensor, x_RD: Tensor, weights_Rm: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_RD).contiguous(), torch.empty_like(weights_Rm).contiguous()


def _backward(
    dy_RD: Tensor,
    saved: Saved,
    pair_Rm: Tensor,
    dw_gate_up: Tensor,
    dw_down: Tensor,
    backend: str,
    *,
    add: bool,
) -> tuple[Tensor, Tensor]:
    dy_RD = dy_RD.contiguous()
    if backend == "reference":
        dx_RD, dweight_P = grouped_mlp_bwd_ref(dy_RD, saved, dw_gate_up, dw_down, add=add)
    else:
        dx_PD, dweight_P = grouped_mlp_bwd(dy_RD, saved, dw_gate_up, dw_down, add=add)
        dx_RD = sum_pairs(dx_PD, pair_Rm)
    return dx_RD, weight_of_slots(dweight_P, pair_Rm)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, main_gate_up, main_down, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[1])
    # Not by save_for_backward: under activation checkpointing it would return other tensors, those
    # of the recomputed forward.
    ctx.main_grads = None if main_gate_up is None else (main_gate_up, main_down)
    ctx.set_materialize_grads(False)


def _op_backward(ctx: Any, dy_RD: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x_RD, weights_Rm, w_gate_up, w_down, *layout, h_P2F = ctx.saved_tensors
    operands = dy_RD, x_RD, weights_Rm, h_P2F, w_gate_up, w_down, *layout
    nothing = (None,) * 7
    if ctx.main_grads is None:
        return *_grouped_mlp_bwd_op(*operands, ctx.backend), *nothing
    dx_RD, dweights_Rm = _grouped_mlp_bwd_into_op(*operands, *ctx.main_grads, ctx.backend)
    return dx_RD, dweights_Rm, None, None, *nothing


_grouped_mlp_op.register_autograd(_op_backward, setup_context=_setup_context)


def grouped_mlp(
    x_RD: Tensor,
    weights_Rm: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    layout: ExpertLayout,
    backend: Backend = "reference",
    main_grads: MainGrads | None = None,
) -> Tensor:
    """Run each pair through its expert, and sum the weighted outputs of each row.

    Experts without a pair get gradients of zero, so that every rank has the same autograd graph.

    :param x_RD: [R, D]: rows in compute precision.
    :param weights_Rm: FP32 [R, m]: router weight of each slot.
    :param w_gate_up: [e, 2F, D]; rows 0..F-1 are the gate.
    :param w_down: [e, D, F].
    :param layout: the pairs, as returned by :func:`expert_layout`.
    :param backend: ``triton`` or ``reference``.
    :param main_grads: tensors to which backward adds the weights' gradients; autograd then gets
        none. ``None`` returns the gradients to autograd.
    :returns: [R, D]; a row without a pair is zero.
    """
    main_pair = (None, None) if main_grads is None else main_grads
    return _grouped_mlp_op(x_RD, weights_Rm, w_gate_up, w_down, *layout, *main_pair, backend)[0]
