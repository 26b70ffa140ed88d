"""What the parts of the GPU check have in common: their set-up, and how tensors compare."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from gpu_check_row import Outcome, Row
from torch import Tensor

from olmo_shard.kernels.language import interpreting

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Largest error by the type in which a kernel computes, relative to a tensor's largest value. The
reference is FP32 on the same device, from the same inputs. bf16 keeps 8 bits, and a result has been
rounded up to three times on its way.
"""
INTERPRETED = 2
"""Times as much in the interpreter, which rounds bf16 down."""

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""What was found and what was expected, by name."""


class Setup(NamedTuple):
    """What every part is told."""

    device: torch.device
    seed: int

    @property
    def tiny(self) -> bool:
        """On a CPU the interpreter runs the kernels: sizes are tiny, and times say nothing."""
        return self.device.type == "cpu"


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest value; what is not finite is an error of infinity."""
    if found.shape != expected.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    difference = (found - expected).abs().nan_to_num(torch.inf)
    return float(difference.max() / expected.abs().max().clamp(min=1e-9))


def close(check: str, dtype: torch.dtype, pairs: Pairs) -> Row:
    """Whether all errors are within the tolerance of ``dtype``."""
    errors = {name: relative_error(*pair) for name, pair in pairs.items()}
    worst = max(errors, key=lambda name: errors[name])
    rounds_down = interpreting() and dtype == torch.bfloat16
    bound = TOLERANCE[dtype] * (INTERPRETED if rounds_down else 1)
    fine = errors[worst] <= bound
    named = f"largest: {worst}"
    if len(errors) <= 5:
        named = ", ".join(f"{name} {value:.1e}" for name, value in errors.items())
    outcome: Outcome = "passed" if fine else "failed"
    target = f"<= {bound:.2g}"
    return Row(check, outcome, errors[worst], "rel. error", target=target, note=named)


def equal(check: str, pairs: Pairs) -> Row:
    """Whether all are equal to the last bit."""
    different = {name: _differences(*pair) for name, pair in pairs.items()}
    wrong = {name: count for name, count in different.items() if count}
    note = ", ".join(f"{name}: {count}" for name, count in wrong.items())
    outcome: Outcome = "failed" if wrong else "passed"
    total = float(sum(wrong.values()))
    return Row(check, outcome, total, "differences", target="= 0", note=note or "bitwise")


def _differences(found: Tensor, expected: Tensor) -> int:
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return max(1, found.numel(), expected.numel())
    found, expected = found.cpu(), expected.cpu()
    return int((~((found == expected) | (found.isnan() & expected.isnan()))).sum())


def claim(
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
    """A figure of speed or memory; on a CPU it is no figure.

    :param target: the least value, or the largest with ``at_most``; null if there is none.
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
    """New tensors without content are full of NaN (integers: of their largest value) inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own operations, named as not deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            assert torch.empty(1, device=device).isnan(), "nothing is poisoned"
            yield
        finally:
            torch.use_deterministic_algorithms(False)
