"""Reports of long waits: which rank waits for which, once, on the console and in the log."""

import io
import re
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from olmo_shard.dispatch.heap import shared_memory
from olmo_shard.dispatch.heap.shared_memory import SharedMemoryHeap
from olmo_shard.distributed import collectives, work
from olmo_shard.distributed.long_waits import LongWaits
from olmo_shard.distributed.runtime import Runtime
from tests.support.ranks import RankGroup, mesh_of

Ranks = Callable[[int], RankGroup]
LIMIT = "(run.timeout_seconds = 600)"


def lines_of(text: io.StringIO) -> list[str]:
    """The reports, with N for the seconds, which depend on the machine's load."""
    return re.sub(r"\b\d+ s\b", "N s", text.getvalue()).splitlines()


@pytest.fixture
def waits() -> LongWaits:
    return LongWaits(report_after=0.1)


def test_a_long_wait_is_reported_once_and_a_short_one_never(waits: LongWaits) -> None:
    waits.log, console = io.StringIO(), io.StringIO()
    log = waits.log
    with redirect_stderr(console):
        waits.start(rank=7, timeout_seconds=600)
        with waits.watch("rows, layer 3", lambda: [7, 9, 11]):
            time.sleep(0.5)
        with waits.watch("reduce", lambda: [9]):
            pass
        waits.stop()
    assert lines_of(log) == [
        f"rank 7 has waited N s for rank(s) 9, 11: rows, layer 3 {LIMIT}",
        "rank 7 stopped waiting after N s: rows, layer 3",
    ]
    assert console.getvalue() == log.getvalue(), "no store: each rank writes on the console"


def test_nothing_is_reported_before_the_start_or_after_the_end(waits: LongWaits) -> None:
    console = io.StringIO()
    with redirect_stderr(console):
        with waits.watch("reduce", list):
            time.sleep(0.3)
        waits.start(rank=0, timeout_seconds=600)
        waits.stop()
        with waits.watch("reduce", list):
            time.sleep(0.3)
    assert console.getvalue() == ""


def test_ranks_that_wait_are_not_named_and_the_lowest_one_prints() -> None:
    """Three ranks of one process share a store; ranks 1 and 2 wait for all, rank 0 does not."""
    store, console = dist.HashStore(), io.StringIO()
    waits = [LongWaits(report_after=1.0) for _ in range(3)]
    logs = [io.StringIO() for _ in waits]
    with redirect_stderr(console):
        for rank, log in enumerate(logs):
            waits[rank].log = log
            waits[rank].start(rank, timeout_seconds=600)
            waits[rank].share(store, 3)
        with (
            waits[1].watch("control", lambda: range(3)),
            waits[2].watch("control", lambda: range(3)),
        ):
            time.sleep(2.0)
        for each in waits:
            each.stop()
    assert logs[0].getvalue() == ""
    for rank in (1, 2):
        report = lines_of(logs[rank])[0]
        assert report == f"rank {rank} has waited N s for rank(s) 0: control {LIMIT}"
    assert console.getvalue() == logs[1].getvalue()


def test_ranks_that_all_wait_are_named_as_waiting() -> None:
    store, log = dist.HashStore(), io.StringIO()
    waits = [LongWaits(report_after=1.0) for _ in range(2)]
    waits[0].log = log
    with redirect_stderr(io.StringIO()):
        for rank in range(2):
            waits[rank].start(rank, timeout_seconds=600)
            waits[rank].share(store, 2)
        with waits[0].watch("reduce", lambda: [0, 1]), waits[1].watch("rows, layer 2", lambda: [0]):
            time.sleep(2.0)
        for each in waits:
            each.stop()
    assert "for rank(s) 1, which wait as well: reduce" in log.getvalue()


def test_a_store_that_fails_hides_no_report(waits: LongWaits) -> None:
    log = waits.log = io.StringIO()

    class Broken:
        def set(self, *_: str) -> None: ...

        def clone(self) -> "Broken":
            return self

        def multi_get(self, _: list[str]) -> list[bytes]:
            raise dist.DistNetworkError("the server has ended")

    store: dist.Store = Broken()  # type: ignore[assignment]
    with redirect_stderr(io.StringIO()):
        waits.start(0, timeout_seconds=600)
        waits.share(store, 2)
        with waits.watch("reduce", lambda: [1]):
            time.sleep(0.5)
        waits.stop()
    assert lines_of(log)[0] == f"rank 0 has waited N s for rank(s) 1: reduce {LIMIT}"


def collective_case(rank: Runtime) -> str:
    """Rank 2 comes late to an all-reduce and an exchange of objects."""
    mesh, console = mesh_of(rank), io.StringIO()
    store = dist.distributed_c10d._get_default_store()
    own = LongWaits(report_after=3.0)
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(console):
        patch.setattr(work, "long_waits", own)
        patch.setattr(collectives, "long_waits", own)
        own.start(rank.rank, rank.timeout.total_seconds())
        own.share(store, rank.world_size)
        collectives.gather_objects(None, mesh.control)
        time.sleep(5.0 * (rank.rank == 2))
        collectives.all_reduce(torch.ones(2), mesh.control, kind="control")
        time.sleep(5.0 * (rank.rank == 2))
        collectives.gather_objects(rank.rank, mesh.control)
        own.stop()
    return console.getvalue()


def test_the_rank_that_comes_late_to_a_collective_is_named(ranks: Ranks) -> None:
    first, second, late = ranks(3).run(collective_case)
    assert (second, late) == ("", ""), "rank 0 waits, so it is the one that prints"
    reports = [line for line in first.splitlines() if "has waited" in line]
    assert len(reports) == 2, first
    for report, what in zip(reports, ("control", "exchange of objects"), strict=True):
        assert report.endswith(f" s for rank(s) 2: {what} (run.timeout_seconds = 120)"), first


def heap_case(rank: Runtime) -> list[str]:
    """Rank 1 sets its flag late."""
    group, console = mesh_of(rank, 2).ep, io.StringIO()
    heap = SharedMemoryHeap(group, 4096, 2, timedelta(seconds=60))
    own = LongWaits(report_after=0.3)
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(console):
        patch.setattr(shared_memory, "long_waits", own)
        own.start(rank.rank, rank.timeout.total_seconds())
        dist.barrier(group=group)
        if rank.rank == 1:
            time.sleep(1.0)
            heap.release(0, flag=0, value=1)
        else:
            heap.wait({1: 0}, 1, "layer 7, epoch 12")
        own.stop()
    dist.barrier(group=group)
    heap.close()
    return lines_of(console)


def test_a_wait_for_rows_names_the_peer_the_layer_and_the_epoch(ranks: Ranks) -> None:
    first, second = ranks(2).run(heap_case)
    assert first == [
        "rank 0 has waited N s for rank(s) 1: layer 7, epoch 12 (run.timeout_seconds = 120)",
        "rank 0 stopped waiting after N s: layer 7, epoch 12",
    ]
    assert second == []
