"""The heap in shared memory: what peers see, what cannot be had, what a kill leaves behind.

Runs in several processes.
"""

import itertools
import os
import resource
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from olmo_shard.dispatch.heap.shared_memory import SharedMemoryHeap
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import HeapError
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


def held_case(rank: Runtime, arena_bytes: int) -> int:
    """Goes on exchanging beside the case, until it is killed; returns the shared bytes it maps."""
    other = 1 - rank.rank
    heap = heap_of(rank, arena_bytes)

    def exchange() -> None:
        for epoch in itertools.count(1):
            heap.arenas[other].fill_(epoch % 100)
            heap.release(other, epoch % 2, epoch)
            heap.wait({other: epoch % 2}, epoch, "a test")

    heap.arenas[other].fill_(1)
    assert heap.arenas[rank.rank].sum() >= 0  # maps it
    threading.Thread(target=exchange, daemon=True).start()
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(t.split()[1]) for t in lines if t.startswith("RssShmem:")) * 1024


def shared_memory_in_use() -> int:
    """Bytes, on this host."""
    (line,) = [t for t in Path("/proc/meminfo").read_text().splitlines() if t[:6] == "Shmem:"]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_five_kills_in_the_middle_leave_nothing_behind():
    """Each time two ranks hold 128 MiB each, are killed while they exchange, and start again."""
    before = shared_memory_in_use()
    for _ in range(5):
        group = RankGroup(2)
        assert min(group.run(held_case, 128 * MIB)) >= 256 * MIB
        time.sleep(0.1)
        group.kill()
    # 1280 MiB were held; others on this host may hold more than before.
    assert shared_memory_in_use() < before + 256 * MIB


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
