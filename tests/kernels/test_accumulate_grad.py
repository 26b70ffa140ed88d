"""accumulate_grad: the docstring's example, interpreter, operators, PTX."""

from typing import Any

import pytest
import torch

from olmo_shard.kernels.accumulate_grad import (
    BLOCK,
    _accumulate_grad_kernel,
    accumulate_grad,
    accumulate_grad_norm,
)
from tests.support.aot import ARCHS, compile_ahead
from tests.support.close import close
from tests.support.ranks import Groups


def test_the_docstrings_example() -> None:
    main = torch.tensor([1.0, 2.0])
    assert accumulate_grad_norm(main, torch.tensor([2.0, -2.0])) == 9
    assert main.tolist() == [3, 0]


def by_triton(_: Any, numel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(numel)
    main, grad = torch.randn(numel), torch.randn(numel, 2)[:, 0].to(dtype)
    expected = main + grad.float()
    plain, with_norm = main.clone(), main.clone()
    accumulate_grad(plain, grad, "triton")
    squares = accumulate_grad_norm(with_norm, grad, "triton")
    assert torch.equal(plain, expected)
    assert torch.equal(with_norm, expected)
    assert squares.dtype == torch.float64
    exact = expected.double().square().sum()  # of positive terms: its own scale
    close(squares, exact, scale=exact, dtype=torch.float32)


@pytest.mark.parametrize("numel", [0, 1, BLOCK, 2 * BLOCK + 17])
def test_the_kernel_equals_an_addition(interpreted: Groups, numel: int) -> None:
    """To the bit, from a gradient that is not contiguous, in two types."""
    for dtype in (torch.float32, torch.bfloat16):
        interpreted(1).run(by_triton, numel, dtype)


def test_the_operators_keep_torchs_contract() -> None:
    arguments = torch.randn(5), torch.randn(5).bfloat16(), "reference"
    torch.library.opcheck(torch.ops.olmo_shard.accumulate_grad, arguments)
    torch.library.opcheck(torch.ops.olmo_shard.accumulate_grad_norm, arguments)


@pytest.mark.parametrize("arch", ARCHS)
def test_it_compiles_ahead_of_time_with_wide_accesses_and_64_bit_offsets(arch: int) -> None:
    types = {"main_ptr": "*fp32:16", "grad_ptr": "*bf16:16", "squares_ptr": "*fp32:16"}
    found = compile_ahead(_accumulate_grad_kernel, arch, types | {"numel": "i64:16"}, BLOCK=BLOCK)
    assert "st.global.v4.b32" in found.ptx
    assert found.spill_bytes == 0
    assert found.registers <= 64
    products = [line for line in found.ttir.splitlines() if "arith.muli" in line]
    assert products
    assert all(line.rstrip().endswith("i64") or ": i64" in line for line in products)
