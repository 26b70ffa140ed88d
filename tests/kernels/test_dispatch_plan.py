"""The plan's kernels: the docstring's example, the reference, the interpreter, PTX.

What the reference itself must hold is in ``tests/dispatch/test_plan.py``.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Groups

pytest.importorskip("triton", reason="Triton exists on Linux alone")

from olmo_shard.dispatch.row_plan import make_plan
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.kernels import dispatch_plan as kernels
from olmo_shard.kernels.dispatch_plan import CELLS, TOKENS, PlanTensors, plan_ref, plan_triton
from tests.support.aot import ARCHS, compile_ahead
from tests.support.launches import products_and_offsets, watched

EXAMPLE = torch.tensor([[3, 0], [2, 3], [-1, 1]])


class Case(NamedTuple):
    tokens: int
    top_k: int
    num_ranks: int
    local_experts: int
    dropped: float = 0.2
    """Share of routes."""
    cells: int = CELLS

    def topk_idx(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.tokens + self.top_k)
        scores = torch.rand(self.tokens, self.num_ranks * self.local_experts, generator=generator)
        idx = scores.argsort(dim=1)[:, : self.top_k]
        lost = torch.rand(idx.shape, generator=generator) < self.dropped
        return torch.where(lost, -1, idx)


CASES = [
    Case(tokens=2 * TOKENS + 3, top_k=4, num_ranks=4, local_experts=4),
    Case(tokens=TOKENS + 1, top_k=5, num_ranks=3, local_experts=2),
    Case(tokens=TOKENS, top_k=3, num_ranks=1, local_experts=7, dropped=0),
    Case(tokens=5, top_k=16, num_ranks=20, local_experts=1),
    Case(tokens=19, top_k=16, num_ranks=2, local_experts=13, dropped=0.5),
    Case(tokens=1, top_k=1, num_ranks=1, local_experts=1, dropped=0),
    Case(tokens=9, top_k=2, num_ranks=2, local_experts=2, dropped=1),
    Case(tokens=0, top_k=2, num_ranks=2, local_experts=2),
    # More pieces than chunks: programs of three pieces, the last one of two.
    Case(tokens=5 * TOKENS - 7, top_k=2, num_ranks=3, local_experts=1, dropped=0.7, cells=8),
]


def interpreted_case(rank: Runtime, cases: list[tuple[Tensor, int, int, int]]) -> list[PlanTensors]:
    found = []
    for topk_idx, num_ranks, local_experts, cells in cases:
        with watched(kernels, CELLS=cells) as watch:
            found.append(plan_triton(topk_idx, num_ranks, local_experts))
        watch.check(launches=2)
    return found


def check_equal(found: PlanTensors, topk_idx: Tensor, num_ranks: int, local_experts: int) -> None:
    reference = plan_ref(topk_idx, num_ranks, local_experts)
    num_tokens, top_k = topk_idx.shape
    num_rows = len(reference.token_S)
    for name, mine, expected in zip(PlanTensors._fields, found, reference, strict=True):
        assert mine.dtype == expected.dtype, name
        if name in ("token_S", "local_expert_Sm"):
            assert len(mine) == num_tokens * min(top_k, num_ranks)
            assert (mine[num_rows:] == -1).all(), name
            mine = mine[:num_rows]
        assert torch.equal(mine, expected), name


def test_the_docstrings_example() -> None:
    plan = plan_ref(EXAMPLE, num_ranks=2, num_local_experts=2)
    assert plan.token_S.tolist() == [0, 2, 0, 1]
    assert plan.send_counts_W.tolist() == [2, 2]
    assert plan.send_routes_W.tolist() == [2, 3]
    assert plan.local_expert_Sm.tolist() == [[-1, 0], [-1, 1], [1, -1], [0, 1]]
    assert plan.row_WT.tolist() == [[0, -1, 1], [2, 3, -1]]
    assert plan.slot_TK.tolist() == [[6, 3], [8, 9], [0, 5]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_and_routes_of_the_reference(case: Case) -> None:
    """Against loops over tokens and ranks."""
    idx, local = case.topk_idx(), case.local_experts
    plan = plan_ref(idx, case.num_ranks, local)
    row = 0
    for rank in range(case.num_ranks):
        here = (idx >= rank * local) & (idx < (rank + 1) * local)
        assert plan.send_routes_W[rank] == here.sum()
        for token, goes in enumerate(here.any(dim=1).tolist()):
            assert plan.row_WT[rank, token] == (row if goes else -1)
            row += goes
    assert row == len(plan.token_S)


def test_the_kernels_equal_the_reference_in_the_interpreter(interpreted: Groups) -> None:
    """Odd sizes, K above and below e, dropped routes, no route, no token; outputs are poisoned."""
    arguments = [(EXAMPLE, 2, 2, CELLS), (torch.full((7, 1), 3), 4, 1, CELLS)]
    arguments += [(c.topk_idx(), c.num_ranks, c.local_experts, c.cells) for c in CASES]
    arguments += [(EXAMPLE.T.contiguous().T, 2, 2, CELLS)]
    (found,) = interpreted(1).run(interpreted_case, arguments)
    for plan, (idx, num_ranks, local_experts, _) in zip(found, arguments, strict=True):
        check_equal(plan, idx, num_ranks, local_experts)


def dispatch_plan_case(rank: Runtime, idx: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    plan = make_plan(idx, 2, 2, layer=3, backend="triton")
    assert plan.layer == 3
    by_slot = plan.weights_by_slot(weights)
    return by_slot, plan.weights_by_route(by_slot), plan.is_sent_WT, *plan.tokens_of_rank


def test_a_plan_longer_than_its_rows_means_the_same(interpreted: Groups) -> None:
    idx, weights = EXAMPLE[1:], torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    plan = make_plan(idx, 2, 2)
    ((by_slot, by_route, goes, *tokens),) = interpreted(1).run(dispatch_plan_case, idx, weights)
    expected = plan.weights_by_slot(weights)
    assert len(expected) == 2
    assert torch.equal(by_slot[:2], expected)
    assert by_slot[2:].tolist() == [[0, 0], [0, 0]]
    assert torch.equal(by_route, torch.where(idx >= 0, weights, 0))
    assert torch.equal(goes, plan.is_sent_WT)
    assert [each.tolist() for each in tokens] == [each.tolist() for each in plan.tokens_of_rank]


INT64, INT32 = "*i64:16", "*i32:16"
SIZES = {"num_tokens": "i32:16", "num_local_experts": "i32"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("top_k", [1, 8, 16])
def test_counting_compiles_ahead_of_time(arch: int, top_k: int) -> None:
    pointers = {"topk_idx_ptr": INT64, "rows_ptr": INT32, "routes_ptr": INT32}
    # Launchers pass the number 1 as a constant.
    compiled = compile_ahead(
        kernels._count_kernel,
        arch,
        pointers | SIZES,
        pieces=1,
        TOP_K=top_k,
        K_PAD=top_k,
        TOKENS=TOKENS,
    )
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 64
    assert products_and_offsets(compiled.ttir) == {"i64"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("top_k", "num_slots", "pieces"), [(8, 8, 1), (8, 8, None), (16, 4, None), (1, 1, 1)]
)
def test_writing_compiles_ahead_of_time_with_64_bit_offsets(
    arch: int, top_k: int, num_slots: int, pieces: int | None
) -> None:
    pointers = dict.fromkeys(("rows_ptr", "routes_ptr", "local_expert_ptr", "row_ptr"), INT32)
    pointers |= dict.fromkeys(
        ("topk_idx_ptr", "token_ptr", "send_counts_ptr", "send_routes_ptr", "slot_ptr"), INT64
    )
    sizes = SIZES | {"max_rows": "i32:16"} | ({} if pieces else {"pieces": "i32"})
    constant: dict[str, Any] = {"pieces": pieces} if pieces else {}
    compiled = compile_ahead(
        kernels._write_kernel,
        arch,
        pointers | sizes,
        **constant,
        TOP_K=top_k,
        NUM_SLOTS=num_slots,
        K_PAD=top_k,
        TOKENS=TOKENS,
        CELLS=CELLS,
    )
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 128
    assert products_and_offsets(compiled.ttir, table=CELLS) == {"i64"}
