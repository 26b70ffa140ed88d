"""Rows travel through mailboxes by kernels: three processes, shared memory, the interpreter, where
the same text runs as on a GPU.

Every rank computes what every other one sends, so what arrives is compared to the bit. Arenas are
full of 0xFF wherever nothing was written, outputs of NaN.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Groups

pytest.importorskip("triton", reason="Triton exists on Linux alone")

from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.kernels import put_packed as put_packed_module
from olmo_shard.kernels.copy_received_rows import (
    copy_received_rows,
    copy_received_rows_ref,
    copy_returned_weights,
)
from olmo_shard.kernels.put_packed import put_packed
from olmo_shard.kernels.put_rows import put_rows, put_rows_ref
from olmo_shard.kernels.reduce_and_put import reduce_and_put
from olmo_shard.kernels.row_moves import RowList
from olmo_shard.kernels.signals import signal_peers, wait_signals
from olmo_shard.kernels.sum_pairs import sum_pairs, sum_pairs_ref
from olmo_shard.kernels.sum_rows import sum_rows, sum_rows_ref
from tests.support.device_heap import SharedGpuHeap
from tests.support.ranks import mesh_of

RANKS, TOKENS, NUM_SLOTS = 3, 5, 3
ROUNDS = 6
SECOND = 1_000_000_000


class Inputs(NamedTuple):
    """What a rank brings to a round."""

    x_ND: Tensor
    sent: RowList
    row_WT: Tensor


def inputs_of(turn: int, source: int, width: int, dtype: torch.dtype) -> Inputs:
    """Rows say source and token in their first element, and are random in the others."""
    generator = random.Random(f"{turn} {source}")
    torch.manual_seed(1000 * turn + source)
    x_ND = torch.randn(TOKENS, width)
    x_ND[:, 0] = 10 * source + torch.arange(TOKENS)
    silent = turn == 2 or (turn + source) % 4 == 1  # nobody sends anything in round 2
    shunned = generator.randrange(RANKS)
    is_sent_WT = torch.rand(RANKS, TOKENS) < 0.6
    is_sent_WT[shunned] = False
    if silent:
        is_sent_WT[:] = False
    row_WT = torch.where(
        is_sent_WT, is_sent_WT.flatten().cumsum(0).view(is_sent_WT.shape) - 1, -1
    ).int()
    # Lists have a static length; nobody reads what lies past the rows.
    row_S = torch.cat([is_sent_WT.nonzero()[:, 1], torch.full((2,), -1)])
    x_ND = x_ND.to(dtype)
    if turn % 3 == 1:  # the rows come in the order of the list
        x_ND = torch.cat([x_ND[row_S[:-2]], torch.full_like(x_ND[:2], torch.nan)])
        row_S = None
    shape = int(is_sent_WT.sum()) + 2, NUM_SLOTS
    sent = RowList(counts_W=is_sent_WT.sum(dim=1), row_S=row_S)
    if turn % 2 == 0:
        sent = sent._replace(
            routes_W=sent.counts_W * 2,
            weights_Sm=torch.rand(shape),
            local_expert_Sm=torch.randint(-1, 4, shape, dtype=torch.int32),
        )
    return Inputs(x_ND, sent, row_WT)


class Results(NamedTuple):
    """What a rank computes from the rows it received."""

    y_PD: Tensor
    pair_Rm: Tensor
    weights_Rm: Tensor


def results_of(turn: int, owner: int, num_rows: int, width: int, dtype: torch.dtype) -> Results:
    """Some rows have no pair, and some slots are empty before those that are not."""
    torch.manual_seed(1000 * turn + 100 + owner)
    pairs = torch.randperm(num_rows * NUM_SLOTS, dtype=torch.int32).view(num_rows, NUM_SLOTS)
    pair_Rm = torch.where(torch.rand(pairs.shape) < 0.4, -1, pairs)
    y_PD = torch.randn(num_rows * NUM_SLOTS, width)
    if dtype == torch.bfloat16:  # sums that need no rounding: the interpreter rounds down
        y_PD = torch.randint(-16, 17, y_PD.shape)
    y_PD = y_PD.to(dtype)
    return Results(y_PD, pair_Rm, torch.rand(num_rows, NUM_SLOTS))


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """New tensors are NaN, or the largest integer, until they are written."""
    torch._C._set_deterministic_algorithms(True)  # torch's public function imports its compiler
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


def assert_bits(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape, what
    same = found.contiguous().view(torch.uint8) == expected.contiguous().view(torch.uint8)
    assert same.all(), what


class End:
    """A rank's end of the exchanges: what a transport will do, step by step."""

    def __init__(self, rank: Runtime, width: int, dtype: torch.dtype, far: tuple[int, ...]) -> None:
        self.layout = MailboxLayout(
            num_ranks=RANKS, max_rows=TOKENS, num_slots=NUM_SLOTS, width=width, dtype=dtype
        )
        self.heap = SharedGpuHeap(mesh_of(rank, RANKS).ep, self.layout, far)
        self.regions = self.layout.regions(self.heap.rank)
        self.epoch = torch.zeros(1, dtype=torch.int64)
        self.error = torch.zeros(RANKS, dtype=torch.int32)

    def finish_put(self, counts_W: Tensor, *, with_metadata: bool) -> None:
        heap = self.heap
        if heap.remote_ranks:
            put_packed(
                heap.remote_peers(),
                counts_W,
                heap.arena,
                heap.flags,
                self.epoch,
                self.regions,
                self.layout.dtype.itemsize,
                with_metadata=with_metadata,
            )
        signal_peers(heap.flag_ptrs, self.epoch, self.regions)

    def wait(self, own_counts_W: Tensor, own_routes_W: Tensor | None) -> tuple[Tensor, Tensor]:
        return wait_signals(
            self.heap.flags,
            self.epoch,
            self.heap.arena,
            own_counts_W,
            own_routes_W,
            self.error,
            60 * SECOND,
            self.regions,
        )

    def assert_regions(self, counts: list[int], routes: list[int], *, metadata: bool) -> None:
        """Headers, and that nothing lies past the rows, or where metadata would lie."""
        slot = int(self.epoch) % 2
        for peer in set(range(RANKS)) - {self.heap.rank}:
            region = self.layout.region(self.heap.arena, self.heap.rank, slot, peer)
            header = region.num_rows.as_strided((2,), (1,))
            assert header.tolist() == [counts[peer], routes[peer]]
            assert (region.rows[counts[peer] :].view(torch.uint8) == 0xFF).all()
            if not metadata:
                assert (region.weights.view(torch.uint8) == 0xFF).all()
                assert (region.local_expert.view(torch.uint8) == 0xFF).all()

    def consumed(self) -> None:
        """Poison the slot: no peer writes there before this rank's next flag."""
        self.heap.arena.view(2, -1)[int(self.epoch) % 2].fill_(0xFF)


def outward(end: End, turn: int, everyone: list[Inputs]) -> list[int]:
    """Push and pull; returns the rows from each rank."""
    me = end.heap.rank
    x_ND, sent, _ = everyone[me]
    metadata = sent.weights_Sm is not None
    put_rows(x_ND, sent, end.heap.peer_ptrs, end.epoch, end.regions, RANKS * TOKENS, 4)
    end.finish_put(sent.counts_W, with_metadata=metadata)
    counts_W, totals = end.wait(sent.counts_W, sent.routes_W)
    counts = [int(each.sent.counts_W[me]) for each in everyone]
    assert counts_W.tolist() == counts, turn
    routes = [2 * count if metadata else 0 for count in counts]
    assert totals.tolist() == [sum(counts), sum(routes), 0]
    end.assert_regions(counts, routes, metadata=metadata)
    num_rows_out = sum(counts) + turn % 3
    with poisoned_outputs():
        rows, weights, experts = copy_received_rows(
            x_ND, sent, counts_W, end.heap.arena, end.epoch, end.regions, num_rows_out, 8
        )

    def of_me(part: str) -> list[Tensor]:
        return [
            getattr(each.sent, part)[: sum(each.sent.counts_W)].split(each.sent.counts_W.tolist())[
                me
            ]
            for each in everyone
        ]

    sent_to_me = [put_rows_ref(each.x_ND, each.sent)[me] for each in everyone]
    assert_bits(rows, copy_received_rows_ref(sent_to_me, num_rows_out, 0), f"rows, round {turn}")
    if metadata:
        assert weights is not None
        assert experts is not None
        assert_bits(
            weights,
            copy_received_rows_ref(of_me("weights_Sm"), num_rows_out, 0),
            f"weights, {turn}",
        )
        assert_bits(
            experts, copy_received_rows_ref(of_me("local_expert_Sm"), num_rows_out, -1), f"{turn}"
        )
    else:
        assert weights is None
        assert experts is None
    end.consumed()
    return counts


def back(end: End, turn: int, everyone: list[Inputs]) -> None:
    """Reduce, push and sum."""
    me = end.heap.rank
    width, dtype = end.layout.width, end.layout.dtype
    sent = everyone[me].sent
    received = [[int(each.sent.counts_W[owner]) for each in everyone] for owner in range(RANKS)]
    results = [
        results_of(turn, owner, sum(received[owner]), width, dtype) for owner in range(RANKS)
    ]
    y_PD, pair_Rm, weights_Rm = results[me]
    sums = [sum_pairs_ref(each.y_PD, each.pair_Rm) for each in results]
    with_weights = turn % 2 == 0
    received_W = torch.tensor(received[me])
    with poisoned_outputs():
        assert_bits(sum_pairs(y_PD, pair_Rm), sums[me], f"sums, round {turn}")
        own_out = y_PD.new_empty(TOKENS, width)
    reduce_and_put(
        y_PD,
        pair_Rm,
        received_W,
        weights_Rm if with_weights else None,
        end.heap.peer_ptrs,
        end.epoch,
        end.regions,
        own_out,
        5,
    )
    assert own_out[received[me][me] :].isnan().all()
    end.finish_put(received_W, with_metadata=with_weights)
    counts_W, totals = end.wait(received_W, None)
    counts = sent.counts_W.tolist()
    assert counts_W.tolist() == counts
    assert totals.tolist() == [sum(counts), 0, 0]
    end.assert_regions(counts, [0] * RANKS, metadata=with_weights)
    with poisoned_outputs():
        out_TD = sum_rows(
            own_out, counts_W, everyone[me].row_WT, end.heap.arena, end.epoch, end.regions
        )
    mine = [sums[owner].split(received[owner])[me] for owner in range(RANKS)]
    assert_bits(out_TD, sum_rows_ref(mine, everyone[me].row_WT), f"sums of tokens, round {turn}")
    if with_weights:
        num_rows_out = sum(counts) + 2
        with poisoned_outputs():
            weights_Sm = copy_returned_weights(
                weights_Rm, received_W, counts_W, end.heap.arena, end.epoch, end.regions,
                num_rows_out, 8,
            )  # fmt: skip
        blocks = [results[owner].weights_Rm.split(received[owner])[me] for owner in range(RANKS)]
        assert_bits(
            weights_Sm, copy_received_rows_ref(blocks, num_rows_out, 0), f"weights back, {turn}"
        )
    end.consumed()


def exchange_case(rank: Runtime, width: int, dtype: torch.dtype, far: tuple[int, ...]) -> int:
    """Returns the rows that were received."""
    end = End(rank, width, dtype, far)
    put: Any = put_packed_module._put_with_signal
    put_packed_module._put_with_signal = end.heap.put_with_signal
    received = 0
    for turn in range(ROUNDS):
        everyone = [inputs_of(turn, source, width, dtype) for source in range(RANKS)]
        received += sum(outward(end, turn, everyone))
        back(end, turn, everyone)
    assert end.epoch.tolist() == [2 * ROUNDS]
    assert not end.error.any()
    put_packed_module._put_with_signal = put
    end.heap.close()
    return received


@pytest.mark.parametrize(
    ("width", "dtype", "far"),
    [
        (64, torch.float32, ()),
        (36, torch.bfloat16, ()),
        (36, torch.float32, (1,)),
        (64, torch.bfloat16, (1, 2)),
    ],
)
def test_what_arrives_is_what_was_sent_outward_and_back(
    interpreted: Groups, width: int, dtype: torch.dtype, far: tuple[int, ...]
) -> None:
    """With ``far`` ranks, rows are packed in staging memory, and a copy plays NVSHMEM's put."""
    received = interpreted(RANKS).run(exchange_case, width, dtype, far)
    assert min(received) > 5, "too few rows to show anything"
