"""The capacity kernel: the docstring's example, order, the interpreter, PTX.

What the reference itself must hold is in ``tests/dispatch/test_capacity.py``.
"""

import functools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Groups

pytest.importorskip("triton", reason="Triton exists on Linux alone")

from olmo_shard.distributed.runtime import Runtime
from olmo_shard.kernels import route_capacity as kernels
from olmo_shard.kernels.route_capacity import (
    DIGIT_BITS,
    DIGITS,
    ROUNDING,
    ROUTES,
    keep_within_capacity,
)
from tests.support.aot import ARCHS, compile_ahead
from tests.support.launches import products_and_offsets, watched

# The smallest numbers, and numbers that differ in one bit of each digit of a key.
SPECIAL = torch.tensor(
    [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-45, -1e-45, 1e-42, 1.0, -1.0, 2.0,
     1 + 2**-23, 1 + 2**-15, 1 + 2**-6]
)  # fmt: skip


Inputs = tuple[Tensor, Tensor, Tensor, int, float]


class Case(NamedTuple):
    tokens: int
    top_k: int
    num_experts: int
    factor: float
    kind: str = "special"
    """Of the weights."""
    labelled: float = 0.8
    """Share of tokens."""
    dropped: float = 0.1
    """Share of routes that are -1 at the start."""

    def inputs(self) -> Inputs:
        generator = torch.Generator().manual_seed(self.tokens + self.num_experts)
        rand = functools.partial(torch.rand, generator=generator)
        idx = rand(self.tokens, self.num_experts).argsort(dim=1)[:, : self.top_k]
        idx = torch.where(rand(idx.shape) < self.dropped, -1, idx)
        weights = {
            "special": SPECIAL[(rand(idx.shape) * len(SPECIAL)).long()],
            "random": rand(idx.shape) - 0.5,
            "equal": torch.full(idx.shape, 0.25),
        }[self.kind]
        return idx, weights, rand(self.tokens) < self.labelled, self.num_experts, self.factor


CASES = [
    Case(tokens=301, top_k=2, num_experts=3, factor=0.7),
    Case(tokens=301, top_k=2, num_experts=3, factor=4.0),
    Case(tokens=64, top_k=4, num_experts=5, factor=0.4, dropped=0),
    Case(tokens=500, top_k=3, num_experts=4, factor=0.5, kind="random"),
    Case(tokens=90, top_k=2, num_experts=2, factor=0.5, labelled=0.1),
    Case(tokens=40, top_k=2, num_experts=2, factor=0.5, labelled=0),
    Case(tokens=40, top_k=2, num_experts=2, factor=0.5, dropped=1),
    Case(tokens=100, top_k=1, num_experts=1, factor=0.07, labelled=1, dropped=0, kind="random"),
    # One route too many, and none.
    Case(tokens=5, top_k=1, num_experts=1, factor=0.8, labelled=1, dropped=0),
    Case(tokens=5, top_k=1, num_experts=1, factor=1.0, labelled=1, dropped=0),
    Case(tokens=1, top_k=1, num_experts=1, factor=1.0),
    Case(tokens=0, top_k=2, num_experts=2, factor=1.0),
    # One hot expert, whose list is longer than what a program holds.
    Case(tokens=2 * ROUTES + 9, top_k=1, num_experts=1, factor=0.6, kind="equal", labelled=0.5),
    Case(tokens=2 * ROUTES + 9, top_k=1, num_experts=1, factor=0.6, kind="random", labelled=0.9),
]


def interpreted_case(rank: Runtime, cases: list[Inputs]) -> list[Tensor]:
    found = []
    for case in cases:
        with watched(kernels) as watch:
            found.append(keep_within_capacity(*case, backend="triton"))
        watch.check(launches=1)
    return found


def test_the_docstrings_example() -> None:
    idx, weights = torch.zeros(4, 1, dtype=torch.int64), torch.tensor([0.5, 0.7, 0.5, 0.9])
    labelled = torch.tensor([True, True, True, False])
    kept = keep_within_capacity(idx, weights[:, None], labelled, 2, 1.0)
    assert kept.tolist() == [[0], [0], [-1], [-1]]


@pytest.mark.parametrize(
    ("weights", "stays"),
    [
        ([-0.0, 0.0], 0),
        ([0.0, -0.0], 0),
        ([math.inf, math.nan], 1),
        ([-math.nan, math.nan], 0),
        ([-math.inf, -1e-45], 1),
        ([1.0, 1.0 + 2**-23], 1),
    ],
)
def test_the_order_of_weights(weights: list[float], stays: int) -> None:
    idx, labelled = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    kept = keep_within_capacity(idx, torch.tensor(weights)[:, None], labelled, 1, 0.5)
    assert kept.flatten().tolist() == [0 if token == stays else -1 for token in range(2)]


def test_a_route_that_was_dropped_before_takes_no_place() -> None:
    idx, labelled = torch.tensor([[-1], [0], [0]]), torch.ones(3, dtype=torch.bool)
    kept = keep_within_capacity(idx, torch.tensor([[3.0], [2.0], [1.0]]), labelled, 1, 0.6)
    assert kept.tolist() == [[-1], [0], [0]]


def test_the_kernel_equals_the_reference_in_the_interpreter(interpreted: Groups) -> None:
    """Odd sizes, ties, NaN, tokens without a label, dropped routes; outputs are poisoned."""
    inputs = [case.inputs() for case in CASES]
    idx, weights, labelled, num_experts, factor = inputs[0]
    strided = idx.T.contiguous().T, weights.T.contiguous().T, labelled, num_experts, factor
    (found,) = interpreted(1).run(interpreted_case, [*inputs, strided])
    for case, mine, given in zip([*CASES, CASES[0]], found, [*inputs, strided], strict=True):
        expected = keep_within_capacity(*given)
        assert mine.dtype == expected.dtype
        assert torch.equal(mine, expected), case


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("top_k", [1, 8])
def test_it_compiles_ahead_of_time_without_spills(arch: int, top_k: int) -> None:
    types = dict.fromkeys(("topk_idx_ptr", "key_ptr", "kept_ptr"), "*i64:16")
    types |= {"weights_ptr": "*fp32:16", "labelled_ptr": "*u8:16", "route_ptr": "*i32:16"}
    compiled = compile_ahead(
        kernels._capacity_kernel,
        arch,
        types | dict.fromkeys(("num_tokens", "num_routes"), "i32:16"),
        num_warps=kernels.WARPS,
        FACTOR=1.25,
        TOP_K=top_k,
        ROUNDING=ROUNDING,
        DIGIT_BITS=DIGIT_BITS,
        DIGITS=DIGITS,
        ROUTES=ROUTES,
    )
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 128  # two programs a multiprocessor
    assert products_and_offsets(compiled.ttir) == {"i64"}
    assert "div.rn.f64" in compiled.ptx, "the limit is not computed in FP64"
    assert "atom.global" not in compiled.ptx
