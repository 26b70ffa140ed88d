"""Rowwise dispatch under stress: ranks that are slow, asleep or gone, and memory over many steps.

Runs in several processes. That it equals ``local`` is shown in test_dispatchers.py.
"""

import os
import random
import re
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor

from olmo_shard.dispatch.dispatcher import DispatchedRows
from olmo_shard.dispatch.heap.shared_memory import SharedMemoryHeap
from olmo_shard.dispatch.mailbox import Mailbox, MailboxLayout
from olmo_shard.dispatch.rowwise import RowwiseDispatcher
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import ConfigurationError, LostPeerError
from tests.support.dispatch import dispatcher
from tests.support.ranks import RankGroup, mesh_of

MIB = 2**20
WIDTH, MOST = 3, 9


class SlowHeap(SharedMemoryHeap):
    """Dawdles at random: before a flag, before a wait and after it."""

    def release(self, peer: int, flag: int, value: int) -> None:
        self._dawdle()
        super().release(peer, flag, value)

    def wait(self, flags: Mapping[int, int], value: int, what: str) -> None:
        self._dawdle()
        super().wait(flags, value, what)
        self._dawdle()

    def _dawdle(self) -> None:
        if random.random() < 0.2:
            time.sleep(random.random() * 0.004)


def stress_case(rank: Runtime, rounds: int) -> int:
    """Forward and backward; values say round, source and token, and all sums are exact in FP32.

    Two experts a rank, two routes a token, some of them dropped; often there are no tokens. Experts
    scale a row by the sum of its weights. Returns the rows that were received.
    """
    random.seed(rank.rank)
    size = rank.world_size
    layout = MailboxLayout(
        num_ranks=size, max_rows=MOST, num_slots=2, width=WIDTH, dtype=torch.float32
    )
    group = mesh_of(rank, size).ep
    heap = SlowHeap(group, layout.arena_bytes, layout.num_flags, timedelta(seconds=60))
    there = RowwiseDispatcher(2 * size, Mailbox(heap, layout), MOST)
    received = 0
    for turn in range(rounds):
        everyone = [stress_inputs(turn, source, size) for source in range(size)]
        x, idx, weights = (each.clone() for each in everyone[rank.rank])
        x.requires_grad_()
        weights.requires_grad_()
        rows = there.finish(there.start(x, idx, weights))
        assert_rows(rows, everyone, rank.rank, f"round {turn}")
        received += len(rows.x_RD)
        out = there.combine(rows.x_RD * rows.weights_Rm.sum(dim=1, keepdim=True), rows.handle)
        total = torch.where(idx >= 0, weights, 0).sum(dim=1, keepdim=True)
        assert torch.equal(out, x * total), f"round {turn}"
        dout = torch.full_like(out, 2.0) + turn % 7
        out.backward(dout)
        assert x.grad is not None
        assert weights.grad is not None
        assert torch.equal(x.grad, dout * total), f"round {turn}"
        dots = (dout * x).sum(dim=1, keepdim=True)
        assert torch.equal(weights.grad, torch.where(idx >= 0, dots, 0)), f"round {turn}"
        del rows, out
    there.close()
    return received


def stress_inputs(turn: int, source: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, experts and weights of a rank: small whole numbers, and halves."""
    generator = random.Random(f"{turn} {source}")
    tokens = 0 if generator.random() < 0.4 else generator.randint(1, MOST)
    tag = torch.arange(tokens, dtype=torch.float32)[:, None] + 100 * source + 10 * (turn % 97)
    experts = range(2 * size)
    picks = [generator.sample(experts, 2) for _ in range(tokens)]
    if turn % 3:  # skewed to one rank
        hot = generator.choice(experts) // 2 * 2
        picks = [[hot, hot + 1] if generator.random() < 0.8 else pick for pick in picks]
    idx = torch.tensor(picks, dtype=torch.int64).view(tokens, 2)
    dropped = torch.tensor([generator.random() < 0.1 for _ in range(2 * tokens)], dtype=torch.bool)
    idx[dropped.view(tokens, 2)] = -1
    weights = torch.tensor([generator.choice([0.5, 1.0, 2.0]) for _ in range(2 * tokens)])
    return tag.expand(tokens, WIDTH), idx, weights.view(tokens, 2)


def assert_rows(
    rows: DispatchedRows, everyone: list[tuple[Tensor, Tensor, Tensor]], rank: int, what: str
) -> None:
    own = [2 * rank, 2 * rank + 1]
    here = [torch.isin(idx, torch.tensor(own)) for _, idx, _ in everyone]
    goes = [mask.any(dim=1) for mask in here]
    x, experts, carried = [], [], []
    for (tokens, idx, weights), mask, chosen in zip(everyone, here, goes, strict=True):
        x.append(tokens[chosen])
        experts.append(torch.where(mask, idx - own[0], -1)[chosen])
        carried.append(torch.where(mask, weights, 0)[chosen])
    assert torch.equal(rows.x_RD, torch.cat(x)), what
    assert torch.equal(rows.local_expert_Rm, torch.cat(experts).to(torch.int32)), what
    assert torch.equal(rows.weights_Rm, torch.cat(carried)), what


def test_three_hundred_rounds_with_random_delays(ranks):
    received = ranks(4).run(stress_case, 300)
    assert min(received) > 300, "too few rows to show anything"


def too_many_case(rank: Runtime) -> None:
    group = mesh_of(rank, 2).ep
    with dispatcher("rowwise", group, experts=2, top_k=1, width=3, max_tokens=4) as there:
        idx = torch.zeros(5, 1, dtype=torch.int64)
        with pytest.raises(
            ConfigurationError, match="micro-batch of 5 tokens does not fit a mailbox made for 4"
        ):
            there.start(torch.zeros(5, 3), idx, torch.ones(5, 1))


def test_a_larger_micro_batch_than_announced_is_refused_before_anything_is_written(ranks):
    ranks(2).run(too_many_case)


def lost_peer_case(rank: Runtime, how: str, expert_parallel: int) -> tuple[str, float]:
    """The last rank dies, or sleeps, in the middle of the third exchange's put.

    Returns the error, and the seconds that it took.
    """
    group = mesh_of(rank, expert_parallel).ep
    size = group.size()
    layout = MailboxLayout(num_ranks=size, max_rows=4, num_slots=1, width=3, dtype=torch.float32)
    seconds = 2 if how == "asleep" else 60
    heap = SharedMemoryHeap(group, layout.arena_bytes, layout.num_flags, timedelta(seconds=seconds))
    there = RowwiseDispatcher(size, Mailbox(heap, layout), max_tokens=4)
    if rank.rank == rank.world_size - 1:
        original, flags_left = heap.release, 3 * (size - 1)

        def release(peer: int, flag: int, value: int) -> None:
            nonlocal flags_left
            flags_left -= 1
            if not flags_left:  # the last peer of the third exchange gets none
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(5)
            original(peer, flag, value)

        heap.release = release  # type: ignore[method-assign]
    begun = time.monotonic()
    try:
        for layer in (7, 8):
            idx = torch.arange(size)[:, None]
            x, weights = torch.ones(size, 3), torch.ones(size, 1)
            rows = there.finish(there.start(x, idx, weights, layer))
            there.combine(rows.x_RD, rows.handle)
    except LostPeerError as error:
        return str(error), time.monotonic() - begun
    return "", 0.0


def test_a_peer_that_was_killed_is_named_with_layer_and_epoch():
    """Rank 3 is rank 1 of the second expert-parallel group. The first one does not notice."""
    group = RankGroup(4)
    outcomes = group.outcomes(lost_peer_case, "killed", 2)
    group.kill()
    assert outcomes[0] == outcomes[1] == (None, ("", 0.0))
    assert outcomes[3] == ("the process ended", None)
    error, (message, seconds) = outcomes[2]
    assert error is None
    assert seconds < 10
    expected = r"rank 2 lost a peer: rank\(s\) 3 \(process \d+\) ended, layer 8, epoch 3"
    assert re.fullmatch(expected, message), message


def test_a_peer_that_sleeps_is_named_after_the_timeout():
    """Rank 2 of 3 has told rank 0, and not rank 1; rank 0 then waits for the answers of both."""
    group = RankGroup(3)
    outcomes = group.outcomes(lost_peer_case, "asleep", 3)
    group.kill()
    error, (message, seconds) = outcomes[1]
    assert error is None
    assert 2 <= seconds < 10
    expected = (
        r"rank 1 timed out waiting 2 s for rank\(s\) 2 \(process \d+\), layer 8, epoch 3; "
        r"if nothing is wrong there, raise run.timeout_seconds"
    )
    assert re.fullmatch(expected, message), message
    assert re.search(r"for rank\(s\) 1 .*, 2 .*layer 8, epoch 4", outcomes[0][1][0]), outcomes[0]


def growth_case(rank: Runtime) -> tuple[int, int]:
    """By how much 50 steps of forward and backward exceed the 10 before them: resident bytes, and
    buffers. Most rows are received in one of the layers, in each step in another one."""
    experts, top_k, width, tokens = 8, 2, 256, 1024
    layout = MailboxLayout(
        num_ranks=2, max_rows=tokens, num_slots=top_k, width=width, dtype=torch.float32
    )
    group = mesh_of(rank, 2).ep
    heap = SharedMemoryHeap(group, layout.arena_bytes, layout.num_flags, timedelta(seconds=60))
    there = RowwiseDispatcher(experts, Mailbox(heap, layout), tokens)
    resident: list[int] = []
    buffers: list[int] = []
    for step in range(60):
        x = torch.randn(tokens, width, requires_grad=True)
        weights = torch.rand(tokens, top_k, requires_grad=True)
        for layer in range(6):
            hot = rank.rank if layer == step % 6 else 0
            idx = torch.tensor([[4 * hot, 4 * hot + 1 + step % 3]]).expand(tokens, top_k)
            x = identity_experts(there, x, idx, weights, layer)
        x.sum().backward()
        del x, weights
        resident.append(resident_bytes())
        buffers.append(len(there._rows._free) + len(there._sums._free))
    there.close()
    return max(resident) - max(resident[:10]), max(buffers) - max(buffers[:10])


def identity_experts(
    there: RowwiseDispatcher, x: Tensor, idx: Tensor, weights: Tensor, layer: int
) -> Tensor:
    rows = there.finish(there.start(x, idx, weights, layer))
    return there.combine(rows.x_RD * rows.weights_Rm.sum(dim=1, keepdim=True), rows.handle)


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(t.split()[1]) for t in lines if t.startswith(("RssAnon:", "RssShmem:"))) * 1024


def test_fifty_skewed_steps_take_no_more_memory(ranks):
    """One that kept the rows of a layer a step would take 50 MiB more; the C allocator's own come
    and go."""
    for resident, buffers in ranks(2).run(growth_case):
        assert buffers == 0
        assert resident < 40 * MIB
