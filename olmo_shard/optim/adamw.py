"""One step of AdamW and of SGD on a main slice, as pure functions.

Scalars that are known only after the gradients were reduced (the clip divisor, whether to skip)
stay on the device, so that a step needs no host sync.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.config import OptimConfig
from olmo_shard.kernels.adamw import AdamWRates, AdamWTensors, adamw, pack_scalars
from olmo_shard.kernels.backend import Backend


@dataclass(frozen=True, kw_only=True)
class StepScalars:
    """What one step has in common for all parameters."""

    lr: float
    config: OptimConfig
    """Betas and epsilon."""
    divisor: Tensor | None
    """FP32 scalar >= 1: gradients are divided by it; null: no clipping (saves a store on a CPU)."""
    skip: Tensor
    """FP32 scalar: 1 leaves weights and moments as they are, 0 applies the step."""
    step: Tensor
    """FP32 scalar: Adam's t, this step included."""

    @cached_property
    def packed(self) -> Tensor:
        """What the Triton kernel reads: made once a step."""
        betas = self.config.beta1, self.config.beta2
        divisor = torch.ones_like(self.skip) if self.divisor is None else self.divisor
        return pack_scalars(divisor, self.skip, self.step, *betas)


class DecayRuns(NamedTuple):
    """A slice as runs that alternate between two weight decays; padding belongs to some run."""

    sizes: list[int]
    """Elements of each run; they add up to the slice."""
    decays: tuple[float, float]
    """Weight decay of the runs 0, 2, 4 ... and of the runs 1, 3, 5 ..."""

    def split(self, *flats: Tensor) -> Iterator[tuple[float, list[list[Tensor]]]]:
        """Each weight decay, with its runs of each of the tensors."""
        runs = [flat.split(self.sizes) for flat in flats]
        for parity, weight_decay in enumerate(self.decays[: len(self.sizes)]):
            yield weight_decay, [list(each[parity::2]) for each in runs]


class SliceState(NamedTuple):
    """A main slice and its state: all [n], FP32 but for ``model``."""

    main: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    model: Tensor
    """The weights in compute precision; ``main`` itself in FP32."""


def adamw_(
    state: SliceState, runs: DecayRuns, scalars: StepScalars, backend: Backend = "reference"
) -> None:
    """AdamW in place (the formula is in ``kernels/adamw.py``), by Triton or by torch's fused
    kernel. ``grad`` may be overwritten.
    """
    if backend == "triton":
        _adamw_triton_(state, runs, scalars)
        return
    config = scalars.config
    for weight_decay, (mains, grads, exp_avgs, exp_avg_sqs) in runs.split(*state[:4]):
        torch._fused_adamw_(
            mains,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [scalars.step] * len(mains),
            lr=scalars.lr,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=weight_decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scalars.divisor,
            found_inf=scalars.skip,
        )
    _write_model(state.main, state.model)


def sgd_(main: Tensor, grad: Tensor, model: Tensor, runs: DecayRuns, scalars: StepScalars) -> None:
    """w = w (1 - lr decay) - lr g / divisor, in place."""
    rate = torch.where(scalars.skip == 0, scalars.lr, 0.0)
    # A skipped gradient may be infinite or NaN, and zero times that is NaN.
    clipped = grad if scalars.divisor is None else grad / scalars.divisor
    update = torch.where(scalars.skip == 0, clipped, 0).mul_(rate)
    for weight_decay, (mains, updates) in runs.split(main, update):
        for weights, change in zip(mains, updates, strict=True):
            weights.mul_(1 - rate * weight_decay).sub_(change)
    _write_model(main, model)


def _adamw_triton_(state: SliceState, runs: DecayRuns, scalars: StepScalars) -> None:
    config = scalars.config
    for weight_decay, lists in runs.split(*state):
        rates = AdamWRates(scalars.lr, weight_decay, config.beta1, config.beta2, config.eps)
        for tensors in zip(*lists, strict=True):
            adamw(AdamWTensors(*tensors), scalars.packed, rates)


def _write_model(main: Tensor, model: Tensor) -> None:
    if model.data_ptr() != main.data_ptr():
        model.copy_(main)
