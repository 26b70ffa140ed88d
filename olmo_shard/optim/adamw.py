"""One step of AdamW and of SGD on a main slice, as pure functions.

Scalars that are known only after the gradients were reduced (the clip divisor, whether to skip)
stay on the device, so that a step needs no host sync.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.config import OptimConfig


@dataclass(frozen=True, kw_only=True)
class StepScalars:
    """What one step has in common for all parameters."""

    lr: float
    divisor: Tensor
    """FP32 scalar >= 1: gradients are divided by it (clipping)."""
    skip: Tensor
    """FP32 scalar: 1 leaves weights and moments as they are, 0 applies the step."""
    step: Tensor
    """FP32 scalar: Adam's t, this step included."""


class DecayGroup(NamedTuple):
    """Ranges of a slice with the same weight decay."""

    weight_decay: float
    ranges: list[tuple[int, int]]
    """(start, end)."""

    def views(self, flat: Tensor) -> list[Tensor]:
        return [flat[start:end] for start, end in self.ranges]


class SliceState(NamedTuple):
    """A main slice and its state: all [n], FP32 but for ``model``."""

    main: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    model: Tensor
    """The weights in compute precision; ``main`` itself in FP32."""


def adamw_(
    state: SliceState, groups: list[DecayGroup], scalars: StepScalars, config: OptimConfig
) -> None:
    """AdamW in place (the formula is in ``kernels/adamw.py``): Triton on CUDA, torch's fused kernel
    on a CPU. ``grad`` may be overwritten.

    :param groups: ranges that cover the slice; what they leave out (padding) is not touched.
    """
    if state.main.is_cuda:
        _adamw_cuda_(state, groups, scalars, config)
        return
    for group in groups:
        torch._fused_adamw_(
            group.views(state.main),
            group.views(state.grad),
            group.views(state.exp_avg),
            group.views(state.exp_avg_sq),
            [],
            [scalars.step] * len(group.ranges),
            lr=scalars.lr,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=group.weight_decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scalars.divisor,
            found_inf=scalars.skip,
        )
    _write_model(state.main, state.model)


def sgd_(
    main: Tensor, grad: Tensor, model: Tensor, groups: list[DecayGroup], scalars: StepScalars
) -> None:
    """w = w (1 - lr decay) - lr g / divisor, in place."""
    rate = torch.where(scalars.skip == 0, scalars.lr, 0.0)
    # A skipped gradient may be infinite or NaN, and zero times that is NaN.
    update = torch.where(scalars.skip == 0, grad / scalars.divisor, 0).mul_(rate)
    for group in groups:
        for start, end in group.ranges:
            main[start:end].mul_(1 - rate * group.weight_decay).sub_(update[start:end])
    _write_model(main, model)


def _adamw_cuda_(
    state: SliceState, groups: list[DecayGroup], scalars: StepScalars, config: OptimConfig
) -> None:
    # Here, not at the top: importing the package needs no Triton.
    from olmo_shard.kernels.adamw import AdamWRates, AdamWTensors, adamw, pack_scalars

    for group in groups:
        rates = AdamWRates(scalars.lr, group.weight_decay, config.beta1, config.beta2, config.eps)
        packed = pack_scalars(scalars.divisor, scalars.skip, scalars.step, rates)
        for views in zip(*(group.views(tensor) for tensor in state), strict=True):
            adamw(AdamWTensors(*views), packed, rates)


def _write_model(main: Tensor, model: Tensor) -> None:
    if model.data_ptr() != main.data_ptr():
        model.copy_(main)
