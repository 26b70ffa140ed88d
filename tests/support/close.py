"""The tolerances of the tests: largest differences between two computations of one number.

[Note: bars scale with operands]
A dot product of n terms that is computed in a type with the relative spacing eps differs from the
exact one by at most ``n * eps * sum |a_i * b_i|``. The bound has the operands on its right side,
not the result. Where the terms cancel, the result is far smaller than the sum of their absolute
values, and the error stays: 1000.1 - 1000 in FP32 is 0.1 to 3e-5, a relative error of 3e-4. Each
processor, each shape and each number of ranks sums in another order, so a bar that is relative to
such a result holds on one machine and fails on the next. Therefore:

- ``close`` takes ``scale``: per element the sum of the absolute values of the terms that were
  added. ``products(a, b)`` gives the scale of ``a @ b``. The scale of a longer computation is the
  computation itself, run on absolute values (``swiglu_scale`` in ``tests/support/scales.py``).
- ``same_figures`` and ``same_weights`` compare training runs, relative to the result. A loss is a
  mean of positive terms, a gradient norm is a sum of squares, and a weight tensor is its start
  plus far smaller updates: none of them cancels, so result and operands have one scale. Routing is
  not continuous: such runs have no near ties (``tests/support/ties.py``).

n is not a factor of the bars: rounding errors have both signs, and the sums here have at most a
few hundred terms, so errors stay within a few eps of the scale.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Bars(NamedTuple):
    """The bars of a computation in one type."""

    rounding: float
    """Largest relative error of one rounding: half the spacing."""
    sums: float
    """Largest error of a sum, over the sum of the absolute values of its terms."""
    training: float
    """Largest relative difference of losses, norms and weights between two training runs."""


BARS = {
    torch.float64: Bars(2.0**-53, sums=4 * 2.0**-52, training=1e-12),
    torch.float16: Bars(2.0**-11, sums=2 * 2.0**-10, training=2e-2),
    torch.float32: Bars(2.0**-24, sums=4 * 2.0**-23, training=1e-5),
    torch.bfloat16: Bars(2.0**-8, sums=2 * 2.0**-7, training=2e-2),
}


def products(a: Tensor, b: Tensor) -> Tensor:
    """The scale of ``a @ b``: the sum of the absolute products per element, in FP64."""
    return a.detach().double().abs() @ b.detach().double().abs()


def share_of_bar(
    found: Tensor,
    expected: Tensor,
    *,
    scale: Tensor | float,
    dtype: torch.dtype | None = None,
) -> float:
    """Largest ratio of an element's error and its bar; a ratio up to 1 is close.

    :param scale: per element (or for all), sum of the absolute values of the added terms.
        An element of scale 0 must be exact.
    :param dtype: type of the computation; ``None`` means the type of ``found``.
    :returns: infinity where a value of ``found`` is NaN.
    """
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not found.numel():
        return 0.0
    bar = BARS[dtype or found.dtype].sums * torch.as_tensor(scale, dtype=torch.float64)
    error = (found.detach().double() - expected.detach().double()).abs().nan_to_num(torch.inf)
    share = torch.where(error == 0, 0.0, error / bar.detach())
    return float(share.max())


def close(
    found: Tensor | None,
    expected: Tensor | None,
    *,
    scale: Tensor | float,
    dtype: torch.dtype | None = None,
    what: str = "",
) -> None:
    """Assert that each element of ``found`` is within the bar; see ``share_of_bar``.

    :param what: name of the tensor, for the message.
    """
    assert found is not None, f"{what} is missing"
    assert expected is not None, f"the reference of {what} is missing"
    share = share_of_bar(found, expected, scale=scale, dtype=dtype)
    assert share <= 1, f"{what}: an error of {share:.3g} bars"


def same_figures(found: Any, expected: Any, dtype: torch.dtype = torch.float32) -> None:
    """Assert that losses and gradient norms of two training runs are equal to rounding.

    :param found: number, or list (of lists) of numbers.
    :param dtype: type in which the layers of either run compute.
    """
    first, second = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    torch.testing.assert_close(first, second, rtol=BARS[dtype].training, atol=0)


def same_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert that FP32 weights of two training runs are equal to rounding, tensor by tensor.

    The scale is the largest value of a tensor.
    """
    assert found.keys() == expected.keys()
    for name, other in expected.items():
        bar = BARS[torch.float32].training * float(other.abs().max())
        torch.testing.assert_close(
            found[name], other, rtol=0, atol=bar, msg=lambda text, name=name: f"{name}: {text}"
        )
