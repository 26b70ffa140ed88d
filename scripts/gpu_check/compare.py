"""The set-up of a part of the GPU check, and rows that compare tensors or report measurements."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.kernels.language import interpreting
from scripts.gpu_check.row import Outcome, Row

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Largest error relative to a tensor's largest value, by the type in which the kernel computes.

The reference computes in FP32 on the same device, from the same inputs. bf16 has 8 significant
bits, and a result has been rounded up to three times.
"""
INTERPRETED = 2
"""Factor of the bf16 tolerance in Triton's interpreter, which rounds bf16 towards zero."""

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""Name to a pair of tensors: the result, and the expected value."""


class Setup(NamedTuple):
    """Device and seed of a run."""

    device: torch.device
    seed: int

    @property
    def tiny(self) -> bool:
        """Whether the run tests the check itself: on a CPU, in the interpreter, at tiny sizes."""
        return self.device.type == "cpu"


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Largest error, divided by the largest expected value.

    :returns: infinity if the shapes differ, or if a difference is not finite.
    """
    if result.shape != expected.shape:
        return float("inf")
    if not result.numel():
        return 0.0
    result, expected = result.detach().double(), expected.detach().double()
    difference = (result - expected).abs().nan_to_num(torch.inf)
    return float(difference.max() / expected.abs().max().clamp(min=1e-9))


def close(check: str, dtype: torch.dtype, pairs: Pairs) -> Row:
    """Row that passes if all errors are within the tolerance of ``dtype``."""
    errors = {name: relative_error(*pair) for name, pair in pairs.items()}
    worst = max(errors, key=lambda name: errors[name])
    rounds_down = interpreting() and dtype == torch.bfloat16
    bound = TOLERANCE[dtype] * (INTERPRETED if rounds_down else 1)
    note = f"largest: {worst}"
    if len(errors) <= 5:
        note = ", ".join(f"{name} {value:.1e}" for name, value in errors.items())
    outcome: Outcome = "passed" if errors[worst] <= bound else "failed"
    target = f"<= {bound:.2g}"
    return Row(check, outcome, errors[worst], "rel. error", target=target, note=note)


def equal(check: str, pairs: Pairs) -> Row:
    """Row that passes if all pairs are bitwise equal."""
    different = {name: _differences(*pair) for name, pair in pairs.items()}
    wrong = {name: count for name, count in different.items() if count}
    note = ", ".join(f"{name}: {count}" for name, count in wrong.items())
    outcome: Outcome = "failed" if wrong else "passed"
    total = float(sum(wrong.values()))
    return Row(check, outcome, total, "differences", target="= 0", note=note or "bitwise")


def _differences(result: Tensor, expected: Tensor) -> int:
    """Number of unequal elements; NaN equals NaN."""
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return max(1, result.numel(), expected.numel())
    result, expected = result.cpu(), expected.cpu()
    return int((~((result == expected) | (result.isnan() & expected.isnan()))).sum())


def measurement(
    setup: Setup,
    check: str,
    unit: str,
    measured: float,
    predicted: float | None,
    target: float | None = None,
    *,
    at_most: bool = False,
    note: str = "",
) -> Row:
    """Row with a speed or an amount of memory; "not measured" on a CPU.

    :param predicted: value of the roofline; ``None`` if there is none.
    :param target: smallest value that meets the target, or the largest with ``at_most``; ``None``
        for a measurement without a target.
    """
    if setup.tiny:
        return Row(check, "not measured", unit=unit, note="not measured on a CPU")
    if target is None:
        return Row(check, "measured", measured, unit, predicted, note=note)
    sign, met = ("<=", measured <= target) if at_most else (">=", measured >= target)
    outcome: Outcome = "met" if met else "not met"
    return Row(check, outcome, measured, unit, predicted, f"{sign} {target:.4g}", note)


@contextmanager
def poisoned(device: torch.device) -> Iterator[None]:
    """Inside, ``torch.empty`` fills tensors with NaN, and integers with their largest value."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch warns about its operations that are not deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            assert torch.empty(1, device=device).isnan(), "nothing is poisoned"
            yield
        finally:
            torch.use_deterministic_algorithms(False)
