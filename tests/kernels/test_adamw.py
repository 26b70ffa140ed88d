"""AdamW's kernel: the docstring's example, the reference, the interpreter, PTX."""

import re
from typing import Any

import pytest
import torch

from tests.support.ranks import Groups

triton = pytest.importorskip("triton", reason="Triton exists on Linux alone")

from olmo_shard.config import OptimConfig  # noqa: E402
from olmo_shard.kernels.adamw import (  # noqa: E402
    BLOCK,
    AdamWRates,
    AdamWTensors,
    _adamw_kernel,
    adamw,
    adamw_ref,
    pack_scalars,
)
from olmo_shard.optim.adamw import DecayRuns, SliceState, StepScalars, adamw_  # noqa: E402
from tests.support.close import close, share_of_bar  # noqa: E402
from tests.support.ptx import ptxas_report  # noqa: E402

RATES = AdamWRates(lr=0.1, weight_decay=0.5, beta1=0.9, beta2=0.99, eps=0.0)


def random_tensors(numel: int, model: torch.dtype | None) -> AdamWTensors:
    generator = torch.Generator().manual_seed(numel)
    main, grad, exp_avg = (torch.randn(numel, generator=generator) for _ in range(3))
    exp_avg_sq = torch.rand(numel, generator=generator)
    copy = main if model is None else torch.full((numel,), torch.nan, dtype=model)
    return AdamWTensors(main, grad, exp_avg, exp_avg_sq, copy)


def adamw_scale(start: AdamWTensors, lr: float) -> dict[str, torch.Tensor]:
    """By name, scales after two steps.

    A moment is a mean of its start and of gradients. The first moment may cancel, and is divided by
    the root of the second: a small second moment magnifies the error.
    """
    main, grad, exp_avg, exp_avg_sq = (each.abs().double() for each in start[:4])
    weight = main + 2 * lr * (exp_avg + grad) / exp_avg_sq.sqrt()
    second = exp_avg_sq + grad.square()
    return dict(
        zip(AdamWTensors._fields, (weight, grad, exp_avg + grad, second, weight), strict=True)
    )


def scalars(
    step: float, divisor: float = 2.0, skip: float = 0.0, rates: AdamWRates = RATES
) -> torch.Tensor:
    values = torch.tensor(divisor), torch.tensor(skip), torch.tensor(step)
    return pack_scalars(*values, rates.beta1, rates.beta2)


def test_the_docstrings_example() -> None:
    main, grad, zero = (torch.tensor([value]) for value in (1.0, 4.0, 0.0))
    tensors = AdamWTensors(main, grad, zero, zero.clone(), zero.bfloat16())
    adamw_ref(tensors, scalars(step=1.0), RATES)
    close(tensors.main, torch.tensor([0.85]), scale=0.95 + 0.1)
    close(tensors.exp_avg, torch.tensor([0.2]), scale=0.2)
    close(tensors.exp_avg_sq, torch.tensor([0.04]), scale=0.04)
    close(tensors.model, torch.tensor([0.85]), scale=0.95 + 0.1)


def test_the_first_steps_correction_is_exact() -> None:
    """1 - 0.999^1 in FP32 would be off by 6e-5."""
    packed = pack_scalars(torch.ones(()), torch.zeros(()), torch.ones(()), 0.9, 0.999)
    close(packed[3].square(), torch.tensor(0.001), scale=0.001)


@pytest.mark.parametrize("numel", [1, 1000, 5000])
def test_reference_equals_torchs_fused_kernel(numel: int) -> None:
    reference, fused = (random_tensors(numel, torch.bfloat16) for _ in range(2))
    rates = RATES._replace(eps=1e-8, lr=1e-2)
    scale = adamw_scale(fused, rates.lr)
    for step in (1.0, 2.0):
        step_scalars = StepScalars(
            lr=rates.lr,
            config=OptimConfig(beta1=rates.beta1, beta2=rates.beta2, eps=rates.eps),
            divisor=torch.tensor(2.0),
            skip=torch.zeros(()),
            step=torch.tensor(step),
        )
        adamw_ref(reference, step_scalars.packed, rates)
        state = SliceState(*(t if t is not fused.grad else t.clone() for t in fused))
        adamw_(state, DecayRuns([numel], (rates.weight_decay, 0.0)), step_scalars)
    for name, found, expected in zip(AdamWTensors._fields, reference, fused, strict=True):
        close(found, expected, scale=scale[name], what=name)


CASES = [(1, "bfloat16", 0.0), (BLOCK, None, 0.0), (3 * BLOCK + 17, "bfloat16", 0.0),
         (2 * BLOCK + 1, "float16", 0.0), (BLOCK + 5, "bfloat16", 1.0)]  # fmt: skip


def by_kernel(_: Any, numel: int, model: str | None, skip: float) -> dict[str, float]:
    """Errors of two steps by the kernel against two by the reference, as shares of the bars."""
    dtype = getattr(torch, model) if model else None
    kernel, reference = random_tensors(numel, dtype), random_tensors(numel, dtype)
    scale = adamw_scale(kernel, RATES.lr)
    rates = RATES._replace(eps=1e-8, beta2=0.9999)
    for step in (1.0, 2.0):
        packed = scalars(step, skip=skip, rates=rates)
        adamw(kernel, packed, rates)
        adamw_ref(reference, packed, rates)
    errors = {}
    for name, found, expected in zip(AdamWTensors._fields, kernel, reference, strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        numbers = found.nan_to_num(0), expected.nan_to_num(0)
        errors[name] = share_of_bar(*numbers, scale=scale[name])
    return errors


@pytest.mark.parametrize(("numel", "model", "skip"), CASES)
def test_the_kernel_equals_the_reference_in_the_interpreter(
    interpreted: Groups, numel: int, model: str | None, skip: float
) -> None:
    """Odd sizes, three types of the model's copy, a skipped step (whose copy stays NaN), and a beta
    close to 1.
    """
    (errors,) = interpreted(1).run(by_kernel, numel, model, skip)
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("copy", ["bf16", None])
def test_it_compiles_ahead_of_time_with_wide_accesses_and_64_bit_offsets(
    arch: int, copy: str | None
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    floats = ("main_ptr", "grad_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "scalars_ptr")
    rates = ("lr", "weight_decay", "one_minus_beta1", "one_minus_beta2", "eps")
    signature = dict.fromkeys(floats, "*fp32") | {"model_ptr": f"*{copy or 'fp32'}"}
    signature |= {"numel": "i64"} | dict.fromkeys(rates, "fp32")
    signature |= {"WRITE_MODEL": "constexpr", "BLOCK": "constexpr"}
    names = _adamw_kernel.arg_names
    source = ASTSource(
        fn=_adamw_kernel,
        signature={name: signature[name] for name in names},
        constexprs={"WRITE_MODEL": copy is not None, "BLOCK": BLOCK},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in (*floats, "model_ptr", "numel")
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
    ptx = compiled.asm["ptx"]
    assert ptx.count("ld.global.v4") >= 4, "loads are not 16 bytes wide"
    assert ptx.count("st.global.v4") >= 3, "stores are not 16 bytes wide"
    report = ptxas_report(ptx, arch)
    assert report.spill_bytes == 0
    assert report.registers <= 64  # so that 1024 threads fit on a multiprocessor
    offset_products = re.findall(r"arith\.muli .* : (\S+)", compiled.asm["ttir"])
    assert offset_products
    assert set(offset_products) == {"i64"}, "a row index times a width in 32 bits"


def test_the_operator_keeps_torchs_contract() -> None:
    tensors = random_tensors(5, torch.bfloat16)._replace(model=torch.zeros(5).bfloat16())
    arguments = (*tensors, scalars(1.0), list(RATES), "reference")
    torch.library.opcheck(torch.ops.olmo_shard.adamw, arguments)
    arguments = (*tensors[:4], None, scalars(1.0), list(RATES), "reference")
    torch.library.opcheck(torch.ops.olmo_shard.adamw, arguments)
