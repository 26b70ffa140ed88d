"""The mailbox protocol: layout, alternation, and a walk through all interleavings of a model of it.

The walk proves [Note: mailbox] for 2 and 3 ranks, and shows that it would find each way
of breaking the protocol.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

from olmo_shard.dispatch.heap.base import SymmetricHeap
from olmo_shard.dispatch.mailbox import SLOTS, Mailbox, MailboxLayout, slot_of


class Step(NamedTuple):
    """One indivisible action of a rank; ``peer`` is whom it writes to, or whose region it reads."""

    action: str
    epoch: int
    peer: int = -1


def program(rank: int, size: int, epochs: int) -> list[Step]:
    """What a rank does. A write takes two steps, as does a read: others may act in between."""
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

    def __init__(self, programs: list[list[Step]], slots: Callable[[int], int]) -> None:
        self.programs, self.slot = programs, slots
        self.size = len(programs)

    def flags(self, done: tuple[int, ...], rank: int, slot: int) -> list[int]:
        """The latest epoch that each peer has released to ``rank`` in that slot."""
        latest = [0] * self.size
        for source in range(self.size):
            for step in self.programs[source][: done[source]]:
                if step[::2] == ("release", rank) and self.slot(step.epoch) == slot:
                    latest[source] = step.epoch
        return [latest[source] for source in range(self.size) if source != rank]

    def enabled(self, done: tuple[int, ...], rank: int) -> bool:
        if done[rank] == len(self.programs[rank]):
            return False
        step = self.programs[rank][done[rank]]
        if step.action != "wait":
            return True
        found = self.flags(done, rank, self.slot(step.epoch))
        assert all(flag <= step.epoch for flag in found), "a flag is ahead of its reader"
        return all(flag == step.epoch for flag in found)

    def check(self, done: tuple[int, ...], rank: int) -> None:
        """Called as ``rank`` has just done a step."""
        step = self.programs[rank][done[rank] - 1]
        if step.action.startswith("read"):
            written = self.last_write(done, step.peer, rank, self.slot(step.epoch))
            assert written == Step("write ends", step.epoch, rank), "read what is not of its epoch"

    def last_write(self, done: tuple[int, ...], source: int, owner: int, slot: int) -> Step | None:
        for step in reversed(self.programs[source][: done[source]]):
            if (
                step.action.startswith("write")
                and step.peer == owner
                and self.slot(step.epoch) == slot
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
        assert moves or done == ends, f"nobody can go on at {done}"
        for rank in moves:
            after = (*done[:rank], done[rank] + 1, *done[rank + 1 :])
            world.check(after, rank)
            if after not in seen:
                seen.add(after)
                pending.append(after)
    assert ends in seen
    return len(seen)


@pytest.mark.parametrize(("size", "epochs", "states"), [(2, 6, 200), (3, 4, 1000)])
def test_no_interleaving_reads_what_is_not_of_its_epoch(size, epochs, states):
    programs = [program(rank, size, epochs) for rank in range(size)]
    assert walk(World(programs, slot_of)) > states


def one_slot(epoch: int) -> int:
    return 0


def two_in_flight(rank: int, size: int, epochs: int) -> list[Step]:
    """Puts epoch n + 1 before it has waited for n."""
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
    steps = program(rank, size, epochs)
    for index, step in enumerate(steps):
        if step.action == "release":
            steps[index - 1], steps[index] = step, steps[index - 1]
    return steps


def silent_without_rows(rank: int, size: int, epochs: int) -> list[Step]:
    """Rank 0 has no rows in the second epoch, and tells nobody."""
    written = ("write begins", "write ends", "release")
    steps = program(rank, size, epochs)
    return [s for s in steps if rank or s.epoch != 2 or s.action not in written]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("broken", "slots"),
    [
        (program, one_slot),
        (two_in_flight, slot_of),
        (never_waited_for, slot_of),
        (released_too_early, slot_of),
        (silent_without_rows, slot_of),
    ],
)
def test_the_walk_finds_each_way_of_breaking_the_protocol(broken, slots, size):
    programs = [broken(rank, size, 4) for rank in range(size)]
    with pytest.raises(AssertionError, match=r"not of its epoch|ahead of its reader|can go on"):
        walk(World(programs, slots))


LAYOUT = MailboxLayout(num_ranks=3, max_rows=5, num_slots=2, width=7, dtype=torch.bfloat16)


def test_regions_of_a_mailbox_do_not_overlap_and_fill_it():
    arena = torch.zeros(LAYOUT.arena_bytes, dtype=torch.uint8)
    value = 0
    regions = {
        (slot, source): LAYOUT.region(arena, 1, slot, source)
        for slot in range(SLOTS)
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


def test_the_formula_is_said_with_its_numbers():
    assert LAYOUT.describe() == (
        "mailboxes of 2 slots x 2 peer(s) x 5 rows x 30 B = 1,280 bytes (1.2 KiB) a rank"
    )


class LonelyHeap(SymmetricHeap):
    """One rank: no peers, no flags."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.arenas = [torch.zeros(0, dtype=torch.uint8)]

    def release(self, peer: int, flag: int, value: int) -> None:
        raise AssertionError("no peers")

    def wait(self, flags: object, value: int, what: str) -> None:
        assert flags == {}

    def close(self) -> None:
        pass


def test_put_and_consume_alternate():
    layout = MailboxLayout(num_ranks=1, max_rows=5, num_slots=2, width=7, dtype=torch.float32)
    mailbox = Mailbox(LonelyHeap(), layout)
    with pytest.raises(AssertionError, match="no exchange is outstanding"):
        mailbox.wait("layer 0")
    mailbox.put(lambda peer, region: None)
    with pytest.raises(AssertionError, match="already outstanding"):
        mailbox.put(lambda peer, region: None)
    with pytest.raises(AssertionError, match="nobody has waited"), mailbox.consume():
        pass
    mailbox.wait("layer 0")
    with pytest.raises(AssertionError, match="already outstanding"):
        mailbox.put(lambda peer, region: None)  # waited for, and not read
    with mailbox.consume() as regions:
        assert regions == {}
    with pytest.raises(AssertionError, match="no exchange is outstanding"), mailbox.consume():
        pass
    mailbox.put(lambda peer, region: None)
    assert mailbox.epoch == 2


def test_what_fails_while_it_is_read_is_not_consumed():
    layout = MailboxLayout(num_ranks=1, max_rows=5, num_slots=2, width=7, dtype=torch.float32)
    mailbox = Mailbox(LonelyHeap(), layout)
    mailbox.put(lambda peer, region: None)
    mailbox.wait("layer 0")
    with pytest.raises(ValueError, match="in the middle"), mailbox.consume():
        raise ValueError("in the middle")
    with pytest.raises(AssertionError, match="already outstanding"):
        mailbox.put(lambda peer, region: None)
