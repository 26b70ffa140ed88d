"""Add a micro-batch's gradient to a main gradient::

    main = main + grad

Example: main = [1, 2], grad = [2, -2] give main = [3, 0].

Each sum is computed in FP32 and rounded once, to the type of ``main``. Bytes moved per element of
an FP32 ``main``: 4 + itemsize of grad read, 4 written. FLOPs per element: 1.

Shape letters: n elements of a parameter.
"""

import torch
from torch import Tensor

from olmo_shard.kernels.language import tl, triton

BLOCK = 2048
"""Elements per Triton program."""


@triton.jit
def _accumulate_grad_kernel(main_ptr, grad_ptr, numel, BLOCK: tl.constexpr):
    # 64 bits: a parameter may have more than 2^31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    # FP32 arithmetic in every type, so that a narrow main gradient is rounded once.
    main = tl.load(main_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    main += tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(main_ptr + offsets, main.to(main_ptr.dtype.element_ty), mask=mask)


def accumulate_grad_triton(main: Tensor, grad: Tensor) -> None:
    """Launch the kernel."""
    assert main.is_contiguous()
    assert main.shape == grad.shape
    if numel := main.numel():
        grid = (triton.cdiv(numel, BLOCK),)
        _accumulate_grad_kernel[grid](main, grad.contiguous(), numel, BLOCK=BLOCK)


def accumulate_grad_ref(main: Tensor, grad: Tensor) -> None:
    """The addition in plain torch."""
    main.add_(grad)


@torch.library.custom_op("olmo_shard::accumulate_grad", mutates_args=("main",))
def _accumulate_grad_op(main: Tensor, grad: Tensor, backend: str) -> None:
    run = accumulate_grad_ref if backend == "reference" else accumulate_grad_triton
    run(main, grad)


def accumulate_grad(main: Tensor, grad: Tensor, backend: str = "reference") -> None:
    """Add a gradient in place.

    :param main: contiguous [n...] in FP32, or in a narrower ``ddp.grad_dtype``.
    :param grad: gradient of the same shape, in any floating-point type.
    """
    _accumulate_grad_op(main, grad, backend)
