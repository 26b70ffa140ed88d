"""One step of AdamW and of SGD as pure functions over lists of FP32 tensors.

Scalars that are known only after the gradients were reduced (the clip divisor, whether the norm is
finite) stay on the device, so that a step needs no host sync.
"""

from dataclasses import dataclass

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


def adamw_(
    mains: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    scalars: StepScalars,
    config: OptimConfig,
    weight_decay: float,
) -> None:
    """AdamW (Loshchilov and Hutter, 2019) in place, by torch's fused kernel::

        g = g / divisor
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = w (1 - lr decay) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    All tensors are FP32. ``grads`` are overwritten with g.

    :param steps: FP32 scalars t, one for each main tensor, counting this step already.
    """
    torch._fused_adamw_(
        mains,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
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


def sgd_(
    mains: list[Tensor], grads: list[Tensor], scalars: StepScalars, weight_decay: float
) -> None:
    """w = w (1 - lr decay) - lr g / divisor, in place."""
    rate = torch.where(scalars.skip == 0, scalars.lr, 0.0)
    # A skipped gradient may be infinite or NaN, and zero times that is NaN.
    for main, grad in zip(mains, grads, strict=True):
        update = torch.where(scalars.skip == 0, grad / scalars.divisor, 0)
        main.mul_(1 - rate * weight_decay).sub_(rate * update)
