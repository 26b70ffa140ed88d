"""Squared norms: chunks in FP32, sums in FP64."""

import pytest
import torch

from olmo_shard.optim.norm import CHUNK, _norms_fp64, squares
from tests.support.close import close


@pytest.mark.parametrize("numel", [0, 1, CHUNK - 1, CHUNK, 3 * CHUNK + 17, 5_000_000])
def test_sums_of_squares_are_exact_to_fp32_rounding(numel):
    generator = torch.Generator().manual_seed(numel)
    gradient = (
        torch.randn(numel, generator=generator) * 10 ** torch.linspace(-6, 3, max(1, numel))[:numel]
    )
    expected = gradient.double().square().sum()  # of positive terms: its own scale
    found = squares([gradient, gradient[:0]])
    assert found.dtype == torch.float64
    close(found[0], expected, scale=expected, dtype=torch.float32)
    assert found[1] == 0


def test_the_gpus_way_gives_the_same():
    gradients = [torch.randn(n) for n in (1, 5000)]
    expected = squares(gradients).sqrt()
    found = torch.stack(_norms_fp64(gradients))
    close(found, expected, scale=expected, dtype=torch.float32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, CHUNK, 2 * CHUNK + 5])
def test_what_is_not_finite_shows(bad, place):
    gradient = torch.ones(2 * CHUNK + 10)
    gradient[place] = bad
    assert not squares([gradient]).isfinite().any()


def test_no_gradient_at_all():
    assert squares([]).tolist() == []
