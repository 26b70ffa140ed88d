"""The docstrings' examples of the transport's kernels, and extreme sizes.

One process of the interpreter stands for rank 1 of three; its peers are tensors beside it.
"""

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Groups

triton = pytest.importorskip("triton", reason="Triton exists on Linux alone")

from olmo_shard.dispatch.row_plan import make_plan  # noqa: E402
from olmo_shard.dispatch.sum_returned_rows import sum_returned_rows  # noqa: E402
from olmo_shard.kernels.copy_received_rows import copy_received_rows, copy_returned_weights  # noqa: E402
from olmo_shard.kernels.language import tl  # noqa: E402
from olmo_shard.kernels.put_packed import packed_bytes  # noqa: E402
from olmo_shard.kernels.put_rows import put_rows  # noqa: E402
from olmo_shard.kernels.reduce_and_put import reduce_and_put  # noqa: E402
from olmo_shard.kernels.row_moves import RowList, copy_values, fill_values  # noqa: E402
from olmo_shard.kernels.signals import signal_peers  # noqa: E402
from olmo_shard.kernels.sum_pairs import sum_pairs, sum_pairs_ref  # noqa: E402
from olmo_shard.kernels.sum_rows import sum_rows, sum_rows_ref  # noqa: E402
from tests.support.device_heap import (  # noqa: E402
    ME,
    MOST,
    RANKS,
    SLOTS,
    Neighbourhood,
    neighbourhood,
    run_alone,
)

ANSWER = 2_000_000_000
"""Nanoseconds, far more than anything here takes."""


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def push_example() -> None:
    near = neighbourhood(epoch=3)
    x_ND = torch.arange(8.0)[:, None]
    sent = RowList(counts_W=torch.tensor([2, 1, 1]), row_S=torch.tensor([5, 7, 7, 2]))
    put_rows(x_ND, sent, near.peer_ptrs, near.epoch, near.regions, max_rows_in_all=4)
    to_0, to_2 = near.region(0, ME, buffer=0), near.region(2, ME, buffer=0)
    assert to_0.rows[:2].tolist() == [[5], [7]]
    assert to_2.rows[:1].tolist() == [[2]]
    assert (to_0.num_rows, to_2.num_rows) == (2, 1)
    assert to_0.weights.data_ptr() == near.arenas[0].data_ptr()  # place 0
    assert (near.arenas[ME] == 0xFF).all()
    assert near.epoch.tolist() == [3]


def signals_example() -> None:
    near = neighbourhood(epoch=4)
    signal_peers(near.flag_ptrs, near.epoch, near.regions)
    assert near.epoch.tolist() == [5]
    assert near.flags[0].tolist() == near.flags[2].tolist() == [0, 0, 0, 0, 5, 0]
    assert not near.flags[ME].any()
    near.arrive(0, num_rows=2, num_routes=4)
    near.arrive(2, num_rows=0, num_routes=0)
    assert near.flags[ME].tolist() == [0, 0, 0, 5, 0, 5]
    error = torch.zeros(RANKS, dtype=torch.int32)
    assert near.wait(error, ANSWER, [9, 1, 9], [9, 2, 9]) == ([2, 1, 0], [3, 6, 0])


def pull_example() -> None:
    near = neighbourhood(epoch=2)
    for source, values in ((0, (10.0, 11.0)), (2, (12.0,))):
        region = near.region(ME, source, buffer=0)
        region.rows[: len(values)] = column(*values)
        region.weights[: len(values)] = 0.5
        region.local_expert[: len(values)] = source
    sent = RowList(
        counts_W=torch.tensor([1, 1, 0]),
        row_S=torch.tensor([0, 3]),
        weights_Sm=torch.tensor([[8.0, 8], [0.25, 0]]),
        local_expert_Sm=torch.tensor([[8, 8], [1, -1]], dtype=torch.int32),
    )
    rows, weights, experts = copy_received_rows(
        torch.arange(4.0)[:, None],
        sent,
        torch.tensor([2, 1, 1]),
        near.arenas[ME],
        near.epoch,
        near.regions,
        num_rows_out=5,
    )
    assert rows.tolist() == [[10], [11], [3], [12], [0]]
    assert weights is not None
    assert experts is not None
    assert weights.tolist() == [[0.5, 0.5]] * 2 + [[0.25, 0], [0.5, 0.5], [0, 0]]
    assert experts.tolist() == [[0, 0]] * 2 + [[1, -1], [2, 2], [-1, -1]]


def reduce_example() -> None:
    near = neighbourhood(epoch=3)
    y_PD = column(1, 2, 4, 8)
    pair_Rm = torch.tensor([[0, 3], [2, -1], [-1, -1], [1, -1]], dtype=torch.int32)
    for sums in (sum_pairs, sum_pairs_ref):
        assert sums(y_PD, pair_Rm).tolist() == [[9], [4], [0], [2]]
    own_out = torch.full((2, 1), torch.nan)
    arguments = (near.peer_ptrs, near.epoch, near.regions, own_out)
    reduce_and_put(y_PD, pair_Rm, torch.tensor([1, 1, 2]), None, *arguments)
    assert near.region(0, ME, buffer=0).rows[0].item() == 9
    assert own_out[0].item() == 4
    assert near.region(2, ME, buffer=0).rows[:2].tolist() == [[0], [2]]


def sum_rows_example() -> None:
    near = neighbourhood(epoch=2)
    near.region(ME, 0, buffer=0).rows[:2] = column(1, 2)
    near.region(ME, 2, buffer=0).rows[:1] = column(8)
    row_WT = torch.tensor([[0, 1, -1], [2, -1, -1], [3, -1, -1]], dtype=torch.int32)
    out_TD = sum_rows(
        column(4), torch.tensor([2, 1, 1]), row_WT, near.arenas[ME], near.epoch, near.regions
    )
    assert out_TD.tolist() == [[13], [2], [0]]
    assert sum_rows_ref([column(1, 2), column(4), column(8)], row_WT).equal(out_TD)


def nothing_at_all() -> None:
    """No rows, no tokens, no pairs: headers and flags alone."""
    near = neighbourhood(epoch=1, width=36)
    none, nothing = torch.empty(0, 36), torch.zeros(RANKS, dtype=torch.int64)
    put_rows(none, RowList(nothing), near.peer_ptrs, near.epoch, near.regions, 0)
    assert near.region(0, ME, buffer=0).num_rows == near.region(2, ME, buffer=0).num_rows == 0
    no_pairs = torch.empty(0, SLOTS, dtype=torch.int32)
    reduce_and_put(none, no_pairs, nothing, None, near.peer_ptrs, near.epoch, near.regions, none)
    arena = (near.arenas[ME], near.epoch, near.regions)
    rows, _, _ = copy_received_rows(none, RowList(nothing), nothing, *arena, num_rows_out=0)
    assert rows.shape == (0, 36)
    rows, _, _ = copy_received_rows(none, RowList(nothing), nothing, *arena, num_rows_out=2)
    assert rows.tolist() == [[0] * 36] * 2
    weights = copy_returned_weights(torch.empty(0, SLOTS), nothing, nothing, *arena, num_rows_out=1)
    assert weights.tolist() == [[0] * SLOTS]
    assert sum_pairs(none, no_pairs).shape == (0, 36)
    no_tokens = torch.empty(RANKS, 0, dtype=torch.int32)
    assert sum_rows(none, nothing, no_tokens, *arena).shape == (0, 36)
    untouched = torch.full((RANKS, 2), -1, dtype=torch.int32)
    assert sum_rows(none, nothing, untouched, *arena).tolist() == [[0] * 36] * 2


def no_more_than_fits() -> None:
    """Counts that cannot be do not end in memory behind a region, nor behind the own rows."""
    near = neighbourhood(epoch=3, width=16)
    many = torch.tensor([MOST + 2, 3, MOST + 2])
    num_rows = int(many.sum())
    x_ND = torch.ones(num_rows, 16)
    put_rows(x_ND, RowList(many), near.peer_ptrs, near.epoch, near.regions, num_rows)
    assert_only_regions_written(near)
    near = neighbourhood(epoch=3, width=16)
    own_out = torch.full((3, 16), torch.nan)
    pair_Rm = torch.arange(num_rows * SLOTS, dtype=torch.int32).view(num_rows, SLOTS) % num_rows
    reduce_and_put(x_ND, pair_Rm, many, None, near.peer_ptrs, near.epoch, near.regions, own_out[:2])
    assert_only_regions_written(near)
    assert own_out[2].isnan().all()
    rows = torch.full((6, 16), torch.nan)
    x_ND.new_empty = lambda num_rows, *_, **__: rows[:num_rows]  # type: ignore[method-assign]
    near.arenas[ME].fill_(0)
    own, came = RowList(torch.tensor([0, 2, 0])), torch.tensor([0, 2, 3])
    copy_received_rows(x_ND, own, came, near.arenas[ME], near.epoch, near.regions, num_rows_out=3)
    assert rows[:2].eq(1).all()
    assert rows[3:].isnan().all()


def assert_only_regions_written(near: Neighbourhood) -> None:
    """Those of slot 0, with as many rows as a region holds."""
    for owner in (0, 2):
        region = near.region(owner, ME, buffer=0)
        assert region.num_rows == MOST
        assert not region.rows.isnan().any()
        region.num_rows.as_strided((2,), (1,)).fill_(-1)
        region.rows.view(torch.uint8).fill_(0xFF)
        assert (near.arenas[owner] == 0xFF).all()


def wide_rows() -> None:
    """Wider than a program takes at a time."""
    near = neighbourhood(epoch=1, width=2100)
    x_ND = torch.randn(3, 2100)
    sent = RowList(torch.tensor([1, 1, 1]))
    put_rows(x_ND, sent, near.peer_ptrs, near.epoch, near.regions, 3)
    assert torch.equal(near.region(2, ME, buffer=0).rows[0], x_ND[2])
    near.region(ME, 0, buffer=1).rows[0] = x_ND[0] + 1
    near.region(ME, 2, buffer=1).rows[0] = x_ND[2] + 1
    arena = (near.arenas[ME], near.epoch, near.regions)
    rows, _, _ = copy_received_rows(x_ND, sent, sent.counts_W, *arena, num_rows_out=4)
    expected = torch.stack([x_ND[0] + 1, x_ND[1], x_ND[2] + 1, torch.zeros(2100)])
    assert torch.equal(rows, expected)
    row_WT = torch.tensor([[0], [1], [2]], dtype=torch.int32)
    blocks = list(expected[:3].split(1))
    found = sum_rows(x_ND[1:2].clone(), sent.counts_W, row_WT, *arena)
    assert torch.equal(found, sum_rows_ref(blocks, row_WT))
    pair_Rm = torch.tensor([[0, 2]], dtype=torch.int32)
    assert torch.equal(sum_pairs(x_ND, pair_Rm), sum_pairs_ref(x_ND, pair_Rm))


@triton.jit
def _values_kernel(source_ptr, copied_ptr, filled_ptr, count):
    worker = tl.program_id(0).to(tl.int64)
    copy_values(source_ptr, copied_ptr, count, worker, tl.num_programs(0))
    fill_values(filled_ptr, count, worker, tl.num_programs(0), -1)


def many_values() -> None:
    """More than two programs take at a time, and not one too many."""
    source = torch.arange(1302, dtype=torch.int32)
    copied, filled = torch.zeros_like(source), torch.zeros_like(source)
    _values_kernel[(2,)](source, copied, filled, 1301)
    assert torch.equal(copied[:1301], source[:1301])
    assert (filled[:1301] == -1).all()
    assert copied[1301] == filled[1301] == 0


def sums_are_in_fp32() -> None:
    """256 + 1 is 256 in bf16, 256 + 1 + 1 is 258 in FP32, rounded once."""
    y_PD = column(256, 1, 1).bfloat16()
    pair_Rm = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    assert sum_pairs(y_PD, pair_Rm).item() == 258
    row_WT = torch.tensor([[0], [1], [2]], dtype=torch.int32)
    assert sum_rows_ref(list(y_PD.split(1)), row_WT).item() == 258
    near = neighbourhood(epoch=2)
    for source, value in ((0, 256), (2, 1)):
        near.region(ME, source, buffer=0).rows.view(torch.bfloat16)[0, 0] = value
    counts_W = torch.tensor([1, 1, 1])
    arena = (near.arenas[ME], near.epoch, near.regions)
    assert sum_rows(column(1).bfloat16(), counts_W, row_WT, *arena).item() == 258


def test_the_docstrings_examples_and_the_extremes(interpreted: Groups) -> None:
    cases = [push_example, signals_example, pull_example, reduce_example, sum_rows_example]
    others = [nothing_at_all, no_more_than_fits, wide_rows, many_values, sums_are_in_fp32]
    interpreted(3).run(run_alone, cases + others)


def test_the_reference_adds_as_the_transport_on_cpus_does() -> None:
    idx_TK = torch.stack([torch.randperm(6)[:3] for _ in range(50)])
    plan = make_plan(idx_TK, num_ranks=RANKS, num_local_experts=2)
    rows = list(torch.randn(sum(plan.send_counts), 5).split(plan.send_counts))
    assert torch.equal(sum_rows_ref(rows, plan.row_WT), sum_returned_rows(rows, plan))


@triton.jit
def _packed_bytes_kernel(out_ptr, num_rows, WITH_METADATA: tl.constexpr):
    rows = tl.load(out_ptr) * 0 + num_rows
    begin, num_bytes = packed_bytes(rows, 128, 192, 80, WITH_METADATA)  # type: ignore[misc]
    tl.store(out_ptr, begin)
    tl.store(out_ptr + 1, begin + num_bytes)


def packed_example() -> None:
    out = torch.zeros(2, dtype=torch.int64)
    expected = {(2, True): [0, 352], (2, False): [128, 352], (0, True): [128, 192]}
    for (num_rows, with_metadata), range_ in expected.items():
        _packed_bytes_kernel[(1,)](out, num_rows, WITH_METADATA=with_metadata)
        assert out.tolist() == range_


def test_the_bytes_of_a_region_that_are_put(interpreted: Groups) -> None:
    interpreted(3).run(run_alone, [packed_example])
