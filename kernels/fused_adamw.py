"""AdamW on flat FP32 tensors in one pass, which also writes the model's copy of the weights
(Loshchilov and Hutter, 2019)::

    g = g / divisor
    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    w = w (1 - lr decay) - lr (m / correction1) / (sqrt(v) / correction2 + eps)

with correction1 = 1 - beta1^t and correction2 = sqrt(1 - beta2^t).

Example: w = 1, g = 4, m = v = 0, t = 1, divisor 2, lr 0.1, decay 0.5, beta1 0.9, beta2 0.99 give
g = 2, m = 0.2, v = 0.04, corrections 0.1 and 0.1, and w = 1 x 0.95 - 0.1 x 2 / 2 = 0.85.

Divisor, skip and corrections are known only on the device, and the kernel reads them there. If skip
is not zero the kernel writes nothing. Bytes moved per element: 16 read and 12 written, and 2 more
for a bf16 copy. FLOPs per element: about 15.

Shape letters: n elements of a slice or of a part of a slice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.kernels.backend import Backend
from olmo_shard.kernels.language import tl, triton

BLOCK = 1024
"""Elements per Triton program."""


class AdamWTensors(NamedTuple):
    """Contiguous tensors [n]. An update writes all of them but ``grad``."""

    main: Tensor
    """FP32: main weights."""
    grad: Tensor
    """FP32: gradient, before the division by ``divisor``."""
    exp_avg: Tensor
    """FP32: first moment m."""
    exp_avg_sq: Tensor
    """FP32: second moment v."""
    model: Tensor | None = None
    """Compute precision: the model's copy of the weights; ``None`` if ``main`` is the model's."""


class AdamWRates(NamedTuple):
    """Values that are known on the host."""

    lr: float
    """Learning rate of these weights: the step's, times the multiplier of their group."""
    weight_decay: float
    beta1: float
    beta2: float
    eps: float


def pack_scalars(divisor: Tensor, skip: Tensor, step: Tensor, beta1: float, beta2: float) -> Tensor:
    """FP32 [4] on the device: divisor, skip, correction1, correction2.

    The corrections are computed in FP64: at t = 1 and beta 0.999 an FP32 power is off by 6e-5.

    :param step: t, this step included.
    """
    t = step.double()
    correction1 = 1 - beta1**t
    correction2 = (1 - beta2**t).sqrt()
    return torch.stack([divisor.double(), skip.double(), correction1, correction2]).float()


@triton.jit
def _adamw_kernel(
    main_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    model_ptr,
    scalars_ptr,
    numel,
    lr,
    weight_decay,
    one_minus_beta1,
    one_minus_beta2,
    eps,
    WRITE_MODEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits: a slice may have more than 2^31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    divisor = tl.load(scalars_ptr)
    skip = tl.load(scalars_ptr + 1)
    correction1 = tl.load(scalars_ptr + 2)
    correction2 = tl.load(scalars_ptr + 3)
    # One branch per program, uniform over the whole launch. A skipped step loads nothing else.
    if skip == 0:
        main = tl.load(main_ptr + offsets, mask=mask)
        grad = tl.load(grad_ptr + offsets, mask=mask) / divisor
        exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask)
        # m + (1 - beta) (g - m), the form of torch.lerp and of torch's fused AdamW.
        exp_avg += one_minus_beta1 * (grad - exp_avg)
        exp_avg_sq += one_minus_beta2 * (grad * grad - exp_avg_sq)
        denominator = tl.sqrt_rn(exp_avg_sq) / correction2 + eps
        main = main * (1 - lr * weight_decay) - lr * (exp_avg / correction1) / denominator
        tl.store(main_ptr + offsets, main, mask=mask)
        tl.store(exp_avg_ptr + offsets, exp_avg, mask=mask)
        tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq, mask=mask)
        if WRITE_MODEL:
            tl.store(model_ptr + offsets, main.to(model_ptr.dtype.element_ty), mask=mask)


def adamw_triton(tensors: AdamWTensors, scalars: Tensor, rates: AdamWRates) -> None:
    """Launch the kernel.

    :param scalars: FP32 [4], what ``pack_scalars`` returned.
    """
    main, grad, exp_avg, exp_avg_sq, model = tensors
    numel = main.numel()
    if numel == 0:
        return
    # The pointer of main stands in for a copy that is not written.
    # 1 - beta is computed here in FP64: 1 - 0.9999 in FP32 would be off by 1.7e-4.
    _adamw_kernel[(triton.cdiv(numel, BLOCK),)](
        main,
        grad,
        exp_avg,
        exp_avg_sq,
        main if model is None else model,
        scalars,
        numel,
        rates.lr,
        rates.weight_decay,
        1 - rates.beta1,
        1 - rates.beta2,
        rates.eps,
        WRITE_MODEL=model is not None,
        BLOCK=BLOCK,
    )


def adamw_ref(tensors: AdamWTensors, scalars: Tensor, rates: AdamWRates) -> None:
    """The update in plain torch."""
    main, grad, exp_avg, exp_avg_sq, model = tensors
    divisor, skip, correction1, correction2 = scalars
    g = grad / divisor
    m = exp_avg.lerp(g, 1 - rates.beta1)
    v = rates.beta2 * exp_avg_sq + (1 - rates.beta2) * g.square()
    update = (m / correction1) / (v.sqrt() / correction2 + rates.eps)
    w = main * (1 - rates.lr * rates.weight_decay) - rates.lr * update
    for old, new in ((main, w), (exp_avg, m), (exp_avg_sq, v), (model, w)):
        if old is not None:
            old.copy_(torch.where(skip == 0, new, old))


@torch.library.custom_op(
    "olmo_shard::adamw", mutates_args=("main", "exp_avg", "exp_avg_sq", "model")
)
def _adamw_op(
    main: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    model: Tensor | None,
    scalars: Tensor,
    rates: list[float],
    backend: str,
) -> None:
    tensors = AdamWTensors(main, grad, exp_avg, exp_avg_sq, model)
    run = adamw_ref if backend == "reference" else adamw_triton
    run(tensors, scalars, AdamWRates(*rates))


def adamw(
    tensors: AdamWTensors, scalars: Tensor, rates: AdamWRates, backend: Backend = "triton"
) -> None:
    """Apply one step of AdamW in place.

    :param scalars: FP32 [4], what ``pack_scalars`` returned.
    """
    _adamw_op(*tensors, scalars, list(rates), backend)
