"""Mailboxes over a symmetric heap: who writes where, when, and when it may be written again.

[Note: mailbox] Words: an *epoch* is one exchange of the group, numbered from 1; a *slot* is one of
the two places that each (source, destination) pair has in the destination's arena, its *region*;
epoch n uses slot n mod 2. In epoch n a rank writes its rows into a region of every peer, none to
some of them as it may be, and releases the region's flag = n. Then it waits until the flags of all
its own regions of that slot equal n, and reads them. It has *consumed* n when it is done reading.

Why no barrier is needed. A source s writes epoch n + 2 where it wrote n. It may do so only once the
destination d has consumed n.

    s writes n + 2  =>  s consumed n + 1        put and consume alternate on each rank
                    =>  s saw d's flag n + 1    consume waits for the flags of all peers
                    =>  d released n + 1        nobody else sets that flag
                    =>  d consumed n            put and consume alternate on d, too

The second line is why every peer gets a flag, with or without rows. The first and last hold only if
put and consume strictly alternate: with two exchanges in flight, or a put that nobody waits for,
rows would be overwritten. So ``put`` asserts that the epoch before was consumed. Two slots are
needed, since a fast source may write n + 1 while the destination still reads n. A flag never passes
the epoch that its reader waits for, by the same argument, so flags are compared for equality.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.dispatch.heap.base import SymmetricHeap
from olmo_shard.distributed.host_memory import format_bytes
from olmo_shard.kernels.regions import Regions

SLOTS = 2
_ALIGN = 64
"""Bytes: a line of the cache, and more than a vector store wants."""


class Region(NamedTuple):
    """What one source writes for one destination in one epoch."""

    weights: Tensor
    """FP32 [max_rows, m]: router weights outward, their gradients on the way back."""
    local_expert: Tensor
    """int32 [max_rows, m]: numbers of experts; outward alone."""
    num_rows: Tensor
    """int64 scalar."""
    rows: Tensor
    """[max_rows, D]."""


@dataclass(frozen=True, kw_only=True)
class MailboxLayout:
    """Sizes of a mailbox, and where its regions lie.

    :param num_ranks: W.
    :param max_rows: rows of a region at most.
    :param num_slots: m = min(K, e), routes of a row at most.
    :param width: D.
    :param dtype: of rows.
    """

    num_ranks: int
    max_rows: int
    num_slots: int
    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Of a row and its metadata: D x itemsize + 8 m."""
        return self.width * self.dtype.itemsize + 8 * self.num_slots

    @property
    def region_bytes(self) -> int:
        return sum(self._part_bytes())

    @property
    def arena_bytes(self) -> int:
        """2 slots x (W - 1) sources x a region."""
        return SLOTS * (self.num_ranks - 1) * self.region_bytes

    def describe(self) -> str:
        """The formula with its numbers."""
        return (
            f"mailboxes of {SLOTS} slots x {self.num_ranks - 1} peer(s) x {self.max_rows} rows x "
            f"{self.row_bytes} B = {format_bytes(self.arena_bytes)} a rank"
        )

    @property
    def num_flags(self) -> int:
        return SLOTS * self.num_ranks

    def flag(self, slot: int, source: int) -> int:
        return slot * self.num_ranks + source

    def regions(self, rank: int) -> Regions:
        """The same for the kernels of a rank."""
        weights, experts, header, _ = self._part_bytes()
        return Regions(
            rank=rank,
            num_ranks=self.num_ranks,
            max_rows=self.max_rows,
            num_slots=self.num_slots,
            width=self.width,
            region_bytes=self.region_bytes,
            experts_at=weights,
            header_at=weights + experts,
            rows_at=weights + experts + header,
        )

    def region(self, arena: Tensor, owner: int, slot: int, source: int) -> Region:
        """A region of ``owner``'s arena; a rank has none for itself."""
        assert owner != source
        place = (source - owner) % self.num_ranks - 1
        start = (slot * (self.num_ranks - 1) + place) * self.region_bytes
        region = arena[start : start + self.region_bytes]
        weights, local_expert, header, rows = region.split(self._part_bytes())
        return Region(
            weights=self._table(weights, torch.float32, self.num_slots),
            local_expert=self._table(local_expert, torch.int32, self.num_slots),
            num_rows=header.view(torch.int64)[0],
            rows=self._table(rows, self.dtype, self.width),
        )

    def _part_bytes(self) -> list[int]:
        """Of a region: weights, experts, header, rows; each starts aligned."""
        metadata = _aligned(self.max_rows * self.num_slots * 4)
        rows = _aligned(self.max_rows * self.width * self.dtype.itemsize)
        return [metadata, metadata, _ALIGN, rows]

    def _table(self, part: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        return part.view(dtype)[: self.max_rows * width].view(self.max_rows, width)


def slot_of(epoch: int) -> int:
    return epoch % SLOTS


class Mailbox:
    """This rank's end of the exchanges of a group. See [Note: mailbox]."""

    def __init__(self, heap: SymmetricHeap, layout: MailboxLayout) -> None:
        self.heap, self.layout = heap, layout
        self.epoch = 0
        self._arrived = 0
        """The last epoch that was waited for."""
        self._consumed = True
        rank, size, arenas = heap.rank, heap.size, heap.arenas
        # Staggered, so that not all ranks write to the same one first.
        self._peers = [(rank + distance) % size for distance in range(1, size)]
        self._outgoing = [
            {peer: layout.region(arenas[peer], peer, slot, rank) for peer in self._peers}
            for slot in range(SLOTS)
        ]
        self._incoming = [
            {peer: layout.region(arenas[rank], rank, slot, peer) for peer in self._peers}
            for slot in range(SLOTS)
        ]

    def put(self, write: Callable[[int, Region], None]) -> None:
        """Begin an epoch: ``write(peer, region)`` for every peer, each followed by its flag."""
        assert self._consumed, "an exchange is already outstanding"
        self._consumed = False
        self.epoch += 1
        slot = slot_of(self.epoch)
        for peer in self._peers:
            write(peer, self._outgoing[slot][peer])
            self.heap.release(peer, self.layout.flag(slot, self.heap.rank), self.epoch)

    def wait(self, what: str) -> None:
        """Wait for all peers.

        :param what: of the model is exchanged, for messages.
        """
        assert not self._consumed, "no exchange is outstanding"
        slot = slot_of(self.epoch)
        flags = {peer: self.layout.flag(slot, peer) for peer in self._peers}
        self.heap.wait(flags, self.epoch, f"{what}, epoch {self.epoch}")
        self._arrived = self.epoch

    @contextmanager
    def consume(self) -> Iterator[dict[int, Region]]:
        """The regions of all peers after ``wait``, to be read inside, once."""
        assert not self._consumed, "no exchange is outstanding"
        assert self._arrived == self.epoch, "nobody has waited for these regions"
        yield self._incoming[slot_of(self.epoch)]
        self._consumed = True

    def close(self) -> None:
        self._outgoing = self._incoming = []
        self.heap.close()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
