"""The heap in shared memory: what peers see, what happens when one is slow, asleep or gone.

Runs in CI, in several processes.
"""

import os
import random
import re
import resource
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.dispatch.heap.shared_memory import SharedMemoryHeap
from olmo_shard.dispatch.mailbox import Mailbox, MailboxLayout
from olmo_shard.dispatch.rowwise import RowwiseDispatcher
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import ConfigurationError, HeapError, LostPeerError
from tests.support.dispatch import dispatcher
from tests.support.ranks import RankGroup, mesh_of

MIB = 2**20


def heap_of(rank: Runtime, arena_bytes: int = 1000, seconds: float = 20) -> SharedMemoryHeap:
    mesh = mesh_of(rank, rank.world_size)
    return SharedMemoryHeap(mesh.ep, arena_bytes, 8, timedelta(seconds=seconds))


def put_case(rank: Runtime) -> None:
    """Made, used and closed three times in one process."""
    other = 1 - rank.rank
    for turn in range(3):
        heap = heap_of(rank)
        assert [arena.shape for arena in heap.arenas] == [(1000,)] * 2
        assert not heap.arenas[rank.rank].any(), "a new arena is zeroed"
        dist.barrier(group=mesh_of(rank, 2).ep)
        heap.arenas[other][10:20] = 7 + turn + rank.rank
        heap.release(other, flag=3, value=5)
        heap.wait({other: 3}, 5, "a test")
        assert heap.arenas[rank.rank][10:20].tolist() == [7 + turn + other] * 10
        assert heap.arenas[rank.rank].sum() == 10 * (7 + turn + other)
        heap.close()


def test_a_put_is_there_once_its_flag_is(ranks):
    ranks(2).run(put_case)


def close_case(rank: Runtime) -> tuple[int, int, int]:
    """Descriptors before, with, and after a heap."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    heap = heap_of(rank)
    during = count()
    view = heap.arenas[rank.rank][:4]
    with pytest.raises(BufferError):
        heap.close()
    assert view.tolist() == [0] * 4, "a view that is in use stays valid"
    del view
    heap.close()
    return before, during, count()


def test_closing_gives_everything_back_but_not_under_a_view(ranks):
    for before, during, after in ranks(2).run(close_case):
        assert before == after < during


def ahead_case(rank: Runtime) -> None:
    heap, other = heap_of(rank), 1 - rank.rank
    heap.release(other, flag=0, value=2)
    with pytest.raises(AssertionError, match="flag 0 is 2, ahead of 1: a test"):
        heap.wait({other: 0}, 1, "a test")
    dist.barrier(group=mesh_of(rank, 2).ep)
    heap.close()


def test_a_flag_that_is_ahead_is_an_error(ranks):
    ranks(2).run(ahead_case)


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
    """Rows say their round, source and token; often there are none. Returns rows received."""
    random.seed(rank.rank)
    size, width, most = rank.world_size, 3, 9
    layout = MailboxLayout(
        num_ranks=size, max_rows=most, num_slots=1, width=width, dtype=torch.float32
    )
    group = mesh_of(rank, size).ep
    heap = SlowHeap(group, layout.arena_bytes, layout.num_flags, timedelta(seconds=60))
    there = RowwiseDispatcher(size, Mailbox(heap, layout), most)
    received = 0
    for turn in range(rounds):
        tokens = [stress_tokens(turn, source, most) for source in range(size)]
        routes = [stress_routes(turn, source, size, tokens[source]) for source in range(size)]
        mine = stress_rows(turn, rank.rank, tokens[rank.rank], width)
        rows = there.finish(there.start(mine, routes[rank.rank], torch.ones(len(mine), 1)))
        expected = torch.cat(
            [
                stress_rows(turn, source, tokens[source], width)[
                    (routes[source] == rank.rank).any(dim=1)
                ]
                for source in range(size)
            ]
        )
        assert torch.equal(rows.x_RD, expected), f"round {turn}"
        received += len(expected)
        back = there.combine(rows.x_RD + 0.5, rows.handle)
        sent = (routes[rank.rank] >= 0).float()
        assert torch.equal(back, (mine + 0.5) * sent), f"round {turn}"
        del rows
    there.close()
    return received


def stress_tokens(turn: int, source: int, most: int) -> int:
    generator = random.Random(f"{turn} {source}")
    return 0 if generator.random() < 0.4 else generator.randint(1, most)


def stress_routes(turn: int, source: int, size: int, tokens: int) -> torch.Tensor:
    """One route a token, or none; skewed to one rank in some rounds."""
    generator = random.Random(f"routes {turn} {source}")
    favourite = generator.randrange(size)
    weights = [20 if d == favourite else 1 for d in range(size)] if turn % 3 else [1] * size
    chosen = generator.choices([*range(size), -1], weights=[*weights, 1], k=tokens)
    return torch.tensor(chosen, dtype=torch.int64).view(tokens, 1)


def stress_rows(turn: int, source: int, tokens: int, width: int) -> torch.Tensor:
    token = torch.arange(tokens, dtype=torch.float32)[:, None]
    return (1000.0 * turn + 100 * source + token).expand(tokens, width)


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


def lost_peer_case(rank: Runtime, how: str) -> tuple[str, float]:
    """Rank 1 dies, or sleeps, in the middle of a put: rank 2 has its rows, rank 0 has not."""
    layout = MailboxLayout(num_ranks=3, max_rows=4, num_slots=1, width=3, dtype=torch.float32)
    group = mesh_of(rank, 3).ep
    seconds = 2 if how == "asleep" else 60
    heap = SharedMemoryHeap(group, layout.arena_bytes, layout.num_flags, timedelta(seconds=seconds))
    there = RowwiseDispatcher(3, Mailbox(heap, layout), max_tokens=4)
    if rank.rank == 1:
        original, calls = heap.release, 0

        def release(peer: int, flag: int, value: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 6:  # two flags an exchange
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(5)
            original(peer, flag, value)

        heap.release = release  # type: ignore[method-assign]
    begun = time.monotonic()
    try:
        for layer in (7, 8):
            idx = torch.arange(3)[:, None]
            rows = there.finish(there.start(torch.ones(3, 3), idx, torch.ones(3, 1), layer))
            there.combine(rows.x_RD, rows.handle)
    except LostPeerError as error:
        return str(error), time.monotonic() - begun
    return "", 0.0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("killed", r"rank 0 lost a peer: rank\(s\) 1 \(process \d+\) ended, layer 8, epoch 3"),
        (
            "asleep",
            r"rank 0 timed out waiting 2 s for rank\(s\) 1 \(process \d+\), layer 8, epoch 3; "
            r"if nothing is wrong there, raise run.timeout_seconds",
        ),
    ],
)
def test_a_lost_peer_is_named_with_layer_and_exchange(how, message):
    group = RankGroup(3)
    outcomes = group.outcomes(lost_peer_case, how)
    group.kill()
    error, (found, seconds) = outcomes[0]
    assert error is None
    assert seconds < 10
    assert re.fullmatch(message, found), found
    if how == "killed":
        assert outcomes[1] == ("the process ended", None)


def held_case(rank: Runtime, arena_bytes: int) -> None:
    """Left in use by this process, as a killed one would leave it."""
    heap = heap_of(rank, arena_bytes)
    heap.arenas[1 - rank.rank].fill_(1)
    heap.release(1 - rank.rank, 0, 1)
    heap.wait({1 - rank.rank: 0}, 1, "a test")
    globals()["_held"] = heap


def shared_memory_in_use() -> int:
    """Bytes, on this host."""
    (line,) = [t for t in Path("/proc/meminfo").read_text().splitlines() if t[:6] == "Shmem:"]
    return int(line.split()[1]) * 1024


def test_five_kills_leave_nothing_behind():
    """Each time two ranks hold 64 MiB each, are killed, and start again."""
    before = shared_memory_in_use()
    for _ in range(5):
        group = RankGroup(2)
        group.run(held_case, 64 * MIB)
        assert shared_memory_in_use() >= before + 100 * MIB
        group.kill()
        assert shared_memory_in_use() < before + 32 * MIB


def too_large_case(rank: Runtime) -> str:
    """Rank 1 may not make files of more than 1 MiB, memory without a name included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(HeapError) as raised:
            heap_of(rank, 2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(raised.value)


def test_memory_that_cannot_be_had_is_an_error_on_every_rank(ranks):
    found = ranks(2).run(too_large_case)
    assert found[0] == found[1]
    assert found[0] == ("rank 1: cannot allocate 2,101,248 bytes of shared memory: File too large")


def unseen_case(rank: Runtime) -> str:
    """Rank 1 cannot open what rank 0 made."""
    original = os.open

    def refuse(path: str, *args: int) -> int:
        if rank.rank == 1 and str(path).startswith("/proc/") and f"/{os.getpid()}/" not in path:
            raise PermissionError(13, "Permission denied")
        return original(path, *args)

    os.open = refuse  # type: ignore[assignment]
    try:
        with pytest.raises(HeapError) as raised:
            heap_of(rank)
    finally:
        os.open = original
    return str(raised.value)


def test_a_peers_memory_that_cannot_be_opened_is_an_error_on_every_rank(ranks):
    found = ranks(2).run(unseen_case)
    assert found[0] == found[1]
    assert found[0].startswith("rank 1: cannot open /proc/")
    assert found[0].endswith("a peer's memory: Permission denied")


def growth_case(rank: Runtime) -> tuple[int, int]:
    """Resident bytes after 10 and after 60 steps of forward and backward, each skewed otherwise."""
    experts, top_k, width, tokens = 8, 2, 256, 512
    layout = MailboxLayout(
        num_ranks=2, max_rows=tokens, num_slots=top_k, width=width, dtype=torch.float32
    )
    group = mesh_of(rank, 2).ep
    heap = SharedMemoryHeap(group, layout.arena_bytes, layout.num_flags, timedelta(seconds=60))
    there = RowwiseDispatcher(experts, Mailbox(heap, layout), tokens)
    resident: list[int] = []
    for step in range(60):
        generator = torch.Generator().manual_seed(step)
        favour = torch.rand(experts, generator=generator) * 3
        scores = torch.rand(tokens, experts, generator=generator) + favour
        idx = scores.argsort(dim=1, descending=True)[:, :top_k]
        x = torch.randn(tokens, width, requires_grad=True)
        weights = torch.rand(tokens, top_k, requires_grad=True)
        for layer in range(3):
            x = identity_experts(there, x, idx, weights, layer)
        x.sum().backward()
        del x, weights
        resident.append(resident_bytes())
    there.close()
    return max(resident[:10]), max(resident)


def identity_experts(
    there: RowwiseDispatcher, x: Tensor, idx: Tensor, weights: Tensor, layer: int
) -> Tensor:
    rows = there.finish(there.start(x, idx, weights, layer))
    return there.combine(rows.x_RD * rows.weights_Rm.sum(dim=1, keepdim=True), rows.handle)


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(t.split()[1]) for t in lines if t.startswith(("RssAnon:", "RssShmem:"))) * 1024


def test_fifty_skewed_steps_take_no_more_memory(ranks):
    """One that kept the rows of one layer would take 25 MiB more."""
    for first, last in ranks(2).run(growth_case):
        assert last - first < 8 * MIB
