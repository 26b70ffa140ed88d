"""Add a gradient to a main gradient, and take the squares of the result on the way::

    main = main + grad

Example: main = [1, 2], grad = [2, -2] give main = [3, 0] and the squared norm 9.

Sums are FP32; each is rounded once. The squares of a block are added in FP32, those
of the blocks in FP64, in a fixed order. Bytes moved per element: 4 + itemsize of grad read, 4
written. FLOPs per element: 3.
"""

import torch
from torch import Tensor

from olmo_shard.kernels.language import tl, triton

BLOCK = 2048


@triton.jit
def _accumulate_grad_kernel(main_ptr, grad_ptr, squares_ptr, numel, BLOCK: tl.constexpr):
    # 64 bits: a parameter may have more than 2^31 elements.
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    main = tl.load(main_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    main += tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(main_ptr + offsets, main.to(main_ptr.dtype.element_ty), mask=mask)
    if squares_ptr is not None:
        tl.store(squares_ptr + block, tl.sum(main * main))


def _accumulate(main: Tensor, grad: Tensor, squares: Tensor | None) -> None:
    assert main.is_contiguous()
    assert main.shape == grad.shape
    if numel := main.numel():
        grid = (triton.cdiv(numel, BLOCK),)
        _accumulate_grad_kernel[grid](main, grad.contiguous(), squares, numel, BLOCK=BLOCK)


@torch.library.custom_op("olmo_shard::accumulate_grad", mutates_args=("main",))
def _accumulate_grad_op(main: Tensor, grad: Tensor, backend: str) -> None:
    if backend == "reference":
        main.add_(grad)
    else:
        _accumulate(main, grad, None)


@torch.library.custom_op("olmo_shard::accumulate_grad_norm", mutates_args=("main",))
def _accumulate_grad_norm_op(main: Tensor, grad: Tensor, backend: str) -> Tensor:
    if backend == "reference":
        main.add_(grad)
        return main.double().square().sum()
    assert main.dtype == torch.float32
    squares = main.new_empty(triton.cdiv(main.numel(), BLOCK))
    _accumulate(main, grad, squares)
    return squares.double().sum()


@_accumulate_grad_norm_op.register_fake
def _(main: Tensor, grad: Tensor, backend: str) -> Tensor:
    return main.new_empty((), dtype=torch.float64)


def accumulate_grad(main: Tensor, grad: Tensor, backend: str = "reference") -> None:
    """Add in place.

    :param main: contiguous; FP32, or narrower where a window's gradients are.
    :param grad: of the same shape, in any floating type.
    """
    _accumulate_grad_op(main, grad, backend)


def accumulate_grad_norm(main: Tensor, grad: Tensor, backend: str = "reference") -> Tensor:
    """The same in FP32; returns the sum of the squares of the result, FP64 scalar."""
    return _accumulate_grad_norm_op(main, grad, backend)
