"""The expert layout's kernels: the docstring's example, the interpreter, PTX."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Groups

pytest.importorskip("triton", reason="Triton exists on Linux alone")

from olmo_shard.distributed.runtime import Runtime
from olmo_shard.kernels import expert_layout as kernels
from olmo_shard.kernels.expert_layout import (
    CELLS,
    SLOTS,
    ExpertLayout,
    expert_layout,
)
from tests.support.aot import ARCHS, compile_ahead
from tests.support.launches import products_and_offsets, watched

EXAMPLE = torch.tensor([[1, 0], [1, -1], [0, -1]], dtype=torch.int32)


class Case(NamedTuple):
    rows: int
    slots: int
    experts: int
    room: int = 0
    """max_pairs beyond the number of pairs."""
    empty: float = 0.3
    """Share of slots."""
    hot: int | None = None
    """An expert that all slots go to."""
    cells: int = CELLS

    def local_expert(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.rows + self.experts)
        shape = (self.rows, self.slots)
        expert = torch.randint(self.experts, shape, generator=generator)
        if self.hot is not None:
            expert.fill_(self.hot)
        empty = torch.rand(shape, generator=generator) < self.empty
        return torch.where(empty, -1, expert).int()


CASES = [
    Case(rows=13, slots=4, experts=5),
    Case(rows=13, slots=4, experts=5, room=1),
    Case(rows=SLOTS // 2 + 7, slots=2, experts=3, room=SLOTS, empty=0),
    Case(rows=SLOTS + 1, slots=1, experts=1, room=5, empty=0.9),
    Case(rows=21, slots=3, experts=4, room=10, empty=1),
    Case(rows=21, slots=3, experts=4, room=10, hot=3),
    Case(rows=0, slots=2, experts=3, room=5),
    Case(rows=0, slots=2, experts=3),
    Case(rows=17, slots=2, experts=20),
    # Room for more than all programs fill at once; more pieces than chunks.
    Case(rows=3, slots=1, experts=2, room=5 * SLOTS + 3),
    Case(rows=5 * SLOTS // 2 - 9, slots=2, experts=3, room=2, cells=8),
    # Too little room: the last pairs are left out.
    Case(rows=300, slots=3, experts=4, room=-100),
    Case(rows=300, slots=3, experts=4, room=-600),
]


# Too many programs for the interpreter: the reference sorts bytes up to 255 experts.
MANY_EXPERTS = [Case(rows=400, slots=2, experts=experts) for experts in (255, 256)]


def max_pairs_of(case: Case) -> int:
    return max(0, int((case.local_expert() >= 0).sum()) + case.room)


def interpreted_case(rank: Runtime, cases: list[tuple[Tensor, int, int, int]]) -> list[Tensor]:
    found = []
    for local_expert, experts, max_pairs, cells in cases:
        with watched(kernels, CELLS=cells) as watch:
            found.append(expert_layout(local_expert, experts, max_pairs, backend="triton"))
        watch.check(launches=2)
    return found


def cut(layout: ExpertLayout, max_pairs: int) -> ExpertLayout:
    """What is left where there is room for so many pairs."""
    return ExpertLayout(
        layout.slot_P[:max_pairs],
        layout.row_P[:max_pairs],
        layout.offsets.clamp(max=max_pairs),
        torch.where(layout.pair_Rm < max_pairs, layout.pair_Rm, -1),
    )


def test_the_docstrings_example() -> None:
    layout = expert_layout(EXAMPLE, 2)
    assert layout.slot_P.tolist() == [1, 4, 0, 2]
    assert layout.row_P.tolist() == [0, 2, 0, 1]
    assert layout.offsets.tolist() == [0, 2, 4]
    assert layout.pair_Rm.tolist() == [[2, 0], [3, -1], [1, -1]]
    assert [each.dtype for each in layout] == [torch.int64, torch.int64, torch.int32, torch.int32]


def test_room_for_more_pairs_is_filled_with_nothing() -> None:
    layout, longer = expert_layout(EXAMPLE, 2), expert_layout(EXAMPLE, 2, max_pairs=6)
    assert longer.slot_P.tolist() == [*layout.slot_P.tolist(), -1, -1]
    assert longer.row_P.tolist() == [*layout.row_P.tolist(), -1, -1]
    assert torch.equal(longer.offsets, layout.offsets)
    assert torch.equal(longer.pair_Rm, layout.pair_Rm)


def test_more_pairs_than_room_fail_in_the_reference() -> None:
    with pytest.raises(AssertionError, match="4 pairs, room for 3"):
        expert_layout(EXAMPLE, 2, max_pairs=3)


def test_triton_is_told_how_many_pairs_there_may_be() -> None:
    with pytest.raises(AssertionError, match="known on the device alone"):
        expert_layout(EXAMPLE, 2, backend="triton")


@pytest.mark.parametrize("case", [*CASES, *MANY_EXPERTS], ids=str)
def test_the_reference_orders_pairs_by_expert_row_and_slot(case: Case) -> None:
    table = case.local_expert()
    pairs = [
        (expert, row, slot)
        for row, slots in enumerate(table.tolist())
        for slot, expert in enumerate(slots)
        if expert >= 0
    ]
    layout = expert_layout(table, case.experts)
    expected = sorted(pairs)
    assert layout.row_P.tolist() == [row for _, row, _ in expected]
    assert layout.slot_P.tolist() == [row * case.slots + slot for _, row, slot in expected]
    for expert in range(case.experts):
        first, end = layout.offsets[expert : expert + 2].tolist()
        assert {each[0] for each in expected[first:end]} <= {expert}
    assert layout.offsets[0] == 0
    assert layout.offsets[-1] == len(pairs)
    for pair, (_, row, slot) in enumerate(expected):
        assert layout.pair_Rm[row, slot] == pair
    assert torch.equal(layout.pair_Rm < 0, table < 0)


def test_the_kernels_equal_the_reference_in_the_interpreter(interpreted: Groups) -> None:
    """Odd sizes, no row, a hot expert, more and less room than pairs; outputs are poisoned."""
    arguments = [(EXAMPLE, 2, 5, CELLS), (EXAMPLE.T.contiguous().T, 2, 4, CELLS)]
    arguments += [(c.local_expert(), c.experts, max_pairs_of(c), c.cells) for c in CASES]
    (found,) = interpreted(1).run(interpreted_case, arguments)
    for layout, (table, experts, max_pairs, _) in zip(found, arguments, strict=True):
        num_pairs = int((table >= 0).sum())
        expected = cut(expert_layout(table, experts, max(num_pairs, max_pairs)), max_pairs)
        for name, mine, theirs in zip(ExpertLayout._fields, layout, expected, strict=True):
            assert mine.dtype == theirs.dtype, name
            assert torch.equal(mine, theirs), name


POINTERS = {"local_expert_ptr": "*i32:16", "pairs_ptr": "*i32:16"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pieces", [1, None])
def test_it_compiles_ahead_of_time_with_64_bit_offsets(arch: int, pieces: int | None) -> None:
    sizes = {"num_slots": "i32:16"} | ({} if pieces else {"pieces": "i32"})
    # Launchers pass the number 1 as a constant.
    constants: dict[str, Any] = {"SLOTS": SLOTS} | ({"pieces": pieces} if pieces else {})
    counting = compile_ahead(kernels._count_kernel, arch, POINTERS | sizes, **constants)
    assert counting.spill_bytes == 0
    assert counting.registers <= 64
    assert products_and_offsets(counting.ttir) == {"i64"}

    pointers = {"slot_ptr": "*i64:16", "row_ptr": "*i64:16"}
    pointers |= {"offsets_ptr": "*i32:16", "pair_ptr": "*i32:16"}
    writing = compile_ahead(
        kernels._write_kernel,
        arch,
        POINTERS | pointers | sizes | {"max_pairs": "i32:16"},
        num_warps=kernels.WARPS,
        SLOTS_OF_ROW=8,
        CELLS=CELLS,
        **constants,
    )
    assert writing.spill_bytes == 0
    assert writing.registers <= 96
    assert products_and_offsets(writing.ttir, table=CELLS) == {"i64"}
