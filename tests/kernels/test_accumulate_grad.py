"""accumulate_grad: the docstring's example, the interpreter, the operator, PTX."""

from typing import Any

import pytest
import torch

from olmo_shard.kernels.accumulate_grad import BLOCK, _accumulate_grad_kernel, accumulate_grad
from tests.support.aot import ARCHS, compile_ahead


def test_the_docstrings_example() -> None:
    main = torch.tensor([1.0, 2.0])
    accumulate_grad(main, torch.tensor([2.0, -2.0]))
    assert main.tolist() == [3, 0]


def by_triton(_: Any, numel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(numel)
    main, grad = torch.randn(numel), torch.randn(numel, 2)[:, 0].to(dtype)
    expected = main + grad.float()
    accumulate_grad(main, grad, "triton")
    assert torch.equal(main, expected)


@pytest.mark.parametrize("numel", [0, 1, BLOCK, 2 * BLOCK + 17])
def test_the_kernel_equals_an_addition(interpreted: Any, numel: int) -> None:
    """To the bit, from a gradient that is not contiguous, in two types."""
    for dtype in (torch.float32, torch.bfloat16):
        interpreted(1).run(by_triton, numel, dtype)


def test_the_operator_keeps_torchs_contract() -> None:
    arguments = torch.randn(5), torch.randn(5).bfloat16(), "reference"
    torch.library.opcheck(torch.ops.olmo_shard.accumulate_grad, arguments)


@pytest.mark.parametrize("arch", ARCHS)
def test_it_compiles_ahead_of_time_with_wide_accesses_and_64_bit_offsets(arch: int) -> None:
    types = {"main_ptr": "*fp32:16", "grad_ptr": "*bf16:16", "numel": "i64:16"}
    compiled = compile_ahead(_accumulate_grad_kernel, arch, types, BLOCK=BLOCK)
    assert "st.global.v4.b32" in compiled.ptx
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 64
    products = [line for line in compiled.ttir.splitlines() if "arith.muli" in line]
    assert products
    assert all(line.rstrip().endswith("i64") or ": i64" in line for line in products)
