"""The mailbox protocol: layout, alternation, and a walk through all interleavings of a model of it.

The walk proves [Note: mailbox] for 2 and 3 ranks, and shows that it would find each way of breaking
the protocol.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

from olmo_shard.dispatch.heap.symmetric_heap import CpuHeap
from olmo_shard.dispatch.mailbox.mailbox_cpu import CpuMailbox
from olmo_shard.dispatch.mailbox.mailbox_layout import NUM_BUFFERS, MailboxLayout, buffer_of


class Step(NamedTuple):
    """One indivisible action of a rank.

    ``peer`` is the rank to which it writes, or whose region it reads.
    """

    action: str
    epoch: int
    peer: int = -1


def program(rank: int, size: int, epochs: int) -> list[Step]:
    """What a rank does. A write and a read take two steps each: other ranks may act in between."""
    peers = [(rank + distance) % size for distance in range(1, size)]
    steps: list[Step] = []
    for epoch in range(1, epochs + 1):
        for peer in peers:
            steps += [Step("write begins", epoch, peer), Step("write ends", epoch, peer)]
            steps += [Step("release", epoch, peer)]
        steps += [Step("wait", epoch)]
        for peer in peers:
            steps += [Step("read begins", epoch, peer), Step("read ends", epoch, peer)]
    return steps


class World:
    """The memory of all ranks after each has run the first ``done[rank]`` steps of its program."""

    def __init__(self, programs: list[list[Step]], buffers: Callable[[int], int]) -> None:
        self.programs, self.buffer = programs, buffers
        self.size = len(programs)

    def flags(self, done: tuple[int, ...], rank: int, buffer: int) -> list[int]:
        """The latest epoch that each peer has released to ``rank`` in a buffer."""
        latest = [0] * self.size
        for source in range(self.size):
            for step in self.programs[source][: done[source]]:
                if step[::2] == ("release", rank) and self.buffer(step.epoch) == buffer:
                    latest[source] = step.epoch
        return [latest[source] for source in range(self.size) if source != rank]

    def enabled(self, done: tuple[int, ...], rank: int) -> bool:
        """Whether a rank can do its next step."""
        if done[rank] == len(self.programs[rank]):
            return False
        step = self.programs[rank][done[rank]]
        if step.action != "wait":
            return True
        flags = self.flags(done, rank, self.buffer(step.epoch))
        assert all(flag <= step.epoch for flag in flags), "a flag is ahead of its reader"
        return all(flag == step.epoch for flag in flags)

    def check(self, done: tuple[int, ...], rank: int) -> None:
        """Assert that the step that ``rank`` has just done read what it should."""
        step = self.programs[rank][done[rank] - 1]
        if step.action.startswith("read"):
            written = self.last_write(done, step.peer, rank, self.buffer(step.epoch))
            assert written == Step("write ends", step.epoch, rank), "read what is not of its epoch"

    def last_write(
        self, done: tuple[int, ...], source: int, owner: int, buffer: int
    ) -> Step | None:
        """The last step in which a source wrote its region in a buffer of the owner."""
        for step in reversed(self.programs[source][: done[source]]):
            if (
                step.action.startswith("write")
                and step.peer == owner
                and self.buffer(step.epoch) == buffer
            ):
                return step
        return None


def walk(world: World) -> int:
    """Visit every reachable state once; returns how many there are."""
    ends = tuple(len(steps) for steps in world.programs)
    pending: list[tuple[int, ...]] = [(0,) * world.size]
    seen = set(pending)
    while pending:
        done = pending.pop()
        moves = [rank for rank in range(world.size) if world.enabled(done, rank)]
        assert moves or done == ends, f"no rank can go on at {done}"
        for rank in moves:
            after = (*done[:rank], done[rank] + 1, *done[rank + 1 :])
            world.check(after, rank)
            if after not in seen:
                seen.add(after)
                pending.append(after)
    assert ends in seen
    return len(seen)


@pytest.mark.parametrize(("size", "epochs", "states"), [(2, 6, 200), (3, 4, 1000)])
def test_no_interleaving_reads_what_is_not_of_its_epoch(
    size: int, epochs: int, states: int
) -> None:
    programs = [program(rank, size, epochs) for rank in range(size)]
    assert walk(World(programs, buffer_of)) > states


def one_buffer(epoch: int) -> int:
    """Every epoch uses the same buffer."""
    return 0


def two_in_flight(rank: int, size: int, epochs: int) -> list[Step]:
    """Each rank puts epoch n + 1 before it has waited for n."""
    by_epoch = [[s for s in program(rank, size, epochs) if s.epoch == n + 1] for n in range(epochs)]
    cut = 3 * (size - 1)
    steps = by_epoch[0][:cut]
    for now, following in pairwise(by_epoch):
        steps += following[:cut] + now[cut:]
    return steps + by_epoch[-1][cut:]


def never_waited_for(rank: int, size: int, epochs: int) -> list[Step]:
    """Rank 0 puts the second epoch and goes on without having waited for it."""
    steps = program(rank, size, epochs)
    consuming = ("wait", "read begins", "read ends")
    return [s for s in steps if rank or s.epoch != 2 or s.action not in consuming]


def released_too_early(rank: int, size: int, epochs: int) -> list[Step]:
    """Each flag is set before the region is complete."""
    steps = program(rank, size, epochs)
    for index, step in enumerate(steps):
        if step.action == "release":
            steps[index - 1], steps[index] = step, steps[index - 1]
    return steps


def silent_without_rows(rank: int, size: int, epochs: int) -> list[Step]:
    """Rank 0 has no rows in the second epoch, and sets no flag."""
    written = ("write begins", "write ends", "release")
    steps = program(rank, size, epochs)
    return [s for s in steps if rank or s.epoch != 2 or s.action not in written]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("broken", "buffers"),
    [
        (program, one_buffer),
        (two_in_flight, buffer_of),
        (never_waited_for, buffer_of),
        (released_too_early, buffer_of),
        (silent_without_rows, buffer_of),
    ],
)
def test_the_walk_finds_each_way_of_breaking_the_protocol(
    broken: Callable[[int, int, int], list[Step]], buffers: Callable[[int], int], size: int
) -> None:
    programs = [broken(rank, size, 4) for rank in range(size)]
    with pytest.raises(AssertionError, match=r"not of its epoch|ahead of its reader|can go on"):
        walk(World(programs, buffers))


LAYOUT = MailboxLayout(num_ranks=3, max_rows=5, num_slots=2, width=7, dtype=torch.bfloat16)


def test_regions_of_a_mailbox_do_not_overlap_and_fill_it() -> None:
    arena = torch.zeros(LAYOUT.arena_bytes, dtype=torch.uint8)
    value = 0
    regions = {
        (buffer, source): LAYOUT.region(arena, 1, buffer, source)
        for buffer in range(NUM_BUFFERS)
        for source in (0, 2)
    }
    for region in regions.values():
        for part in region:
            value += 1
            part.fill_(value)
    value = 0
    for region in regions.values():
        for part in region:
            value += 1
            assert (part == value).all()
        assert region.rows.data_ptr() % 16 == arena.data_ptr() % 16
    rows = 2 * (5 * 7 * 2 + 5 * 2 * 8)
    assert LAYOUT.row_bytes == 7 * 2 + 8 * 2
    # 4 regions: a header of 64 bytes, and three tables of 40, 40 and 70 bytes.
    assert LAYOUT.arena_bytes == 4 * (64 + 64 + 64 + 128) > 2 * rows


def test_the_description_is_the_formula_with_its_numbers() -> None:
    assert LAYOUT.describe() == (
        "mailboxes of 2 buffers x 2 peer(s) x 5 rows x 30 B = 1,280 bytes (1.2 KiB) per rank"
    )


class RecordingHeap(CpuHeap):
    """One of ``size`` ranks; records the flags that it sets, and never waits."""

    def __init__(self, layout: MailboxLayout) -> None:
        self.rank, self.size = 0, layout.num_ranks
        self.arenas = [torch.zeros(layout.arena_bytes, dtype=torch.uint8) for _ in range(self.size)]
        self.released: list[tuple[int, int, int]] = []

    def release(self, peer: int, flag: int, value: int) -> None:
        """Record a flag."""
        self.released.append((peer, flag, value))

    def wait(self, flags: Mapping[int, int], value: int, what: str) -> None:
        """Check what is waited for."""
        buffer = value % 2
        assert flags == {1: buffer * 3 + 1, 2: buffer * 3 + 2}
        assert what == f"layer 4, epoch {value}"

    def close(self) -> None:
        """Nothing to free."""


def put(mailbox: CpuMailbox) -> None:
    """A put without rows."""
    for peer, _ in mailbox.begin_put():
        mailbox.end_put(peer)


def test_put_and_consume_alternate() -> None:
    mailbox = CpuMailbox(RecordingHeap(LAYOUT), LAYOUT)
    with pytest.raises(AssertionError, match="no exchange is outstanding"), mailbox.consume(4):
        pass
    put(mailbox)
    with pytest.raises(AssertionError, match="already outstanding"):
        mailbox.begin_put()
    with mailbox.consume(4) as regions:
        assert set(regions) == {1, 2}
        with pytest.raises(AssertionError, match="already outstanding"):
            mailbox.begin_put()  # waited for, and not yet read
    with pytest.raises(AssertionError, match="no exchange is outstanding"), mailbox.consume(4):
        pass
    put(mailbox)
    assert mailbox.epoch == 2


def test_every_peer_gets_its_flag_before_anything_is_consumed() -> None:
    """Flag 3 is that of source 0 in buffer 1, which epoch 1 uses; flag 0 that in buffer 0."""
    heap = RecordingHeap(LAYOUT)
    mailbox = CpuMailbox(heap, LAYOUT)
    regions = dict(mailbox.begin_put())
    assert set(regions) == {1, 2}
    mailbox.end_put(2)
    with pytest.raises(AssertionError, match="a peer's flag was not set"), mailbox.consume(4):
        pass
    mailbox.end_put(1)
    assert heap.released == [(2, 3, 1), (1, 3, 1)]
    with pytest.raises(KeyError):
        mailbox.end_put(1)
    with mailbox.consume(4):
        pass
    put(mailbox)
    assert heap.released[2:] == [(1, 0, 2), (2, 0, 2)]


def test_what_fails_while_it_is_read_is_not_consumed() -> None:
    mailbox = CpuMailbox(RecordingHeap(LAYOUT), LAYOUT)
    put(mailbox)
    with pytest.raises(ValueError, match="in the middle"), mailbox.consume(4):
        raise ValueError("in the middle")
    with pytest.raises(AssertionError, match="already outstanding"):
        mailbox.begin_put()
