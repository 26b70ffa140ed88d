"""Mailboxes whose rows are copied by the CPU. See [Note: mailbox] in ``mailbox_layout.py``."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from olmo_shard.dispatch.heap.symmetric_heap import CpuHeap
from olmo_shard.dispatch.mailbox.mailbox_layout import (
    NUM_BUFFERS,
    MailboxLayout,
    Region,
    buffer_of,
)
from olmo_shard.distributed.comm_stats import comm_stats


class CpuMailbox:
    """This rank's end of the exchanges of a group.

    An epoch is: ``begin_put``; for each peer, writes to its region and ``end_put``; ``consume``.

    :ivar epoch: number of the current epoch, 0 before the first.
    """

    def __init__(self, heap: CpuHeap, layout: MailboxLayout) -> None:
        self.heap, self.layout = heap, layout
        self.epoch = 0
        self._consumed = True
        self._unreleased: set[int] = set()
        """Peers whose flag of this epoch is not set yet."""
        rank, size, arenas = heap.rank, heap.size, heap.arenas
        # Staggered, so that not all ranks write to the same peer first.
        self._peers = [(rank + distance) % size for distance in range(1, size)]
        self._outgoing = [
            {peer: layout.region(arenas[peer], peer, buffer, rank) for peer in self._peers}
            for buffer in range(NUM_BUFFERS)
        ]
        self._incoming = [
            {peer: layout.region(arenas[rank], rank, buffer, peer) for peer in self._peers}
            for buffer in range(NUM_BUFFERS)
        ]

    def begin_put(self) -> list[tuple[int, Region]]:
        """Begin an epoch.

        :returns: each peer and this rank's region in the peer's arena, to be written now. Each
            region must be followed by ``end_put(peer)``, even if it has no rows.
        """
        assert self._consumed, "an exchange is already outstanding"
        self._consumed = False
        self.epoch += 1
        self._unreleased = set(self._peers)
        return list(self._outgoing[buffer_of(self.epoch)].items())

    def end_put(self, peer: int) -> None:
        """Set the flag of a peer's region, after all that was written into the region."""
        self._unreleased.remove(peer)
        flag = self.layout.flag(buffer_of(self.epoch), self.heap.rank)
        self.heap.release(peer, flag, self.epoch)

    @contextmanager
    def consume(self, layer: int) -> Iterator[dict[int, Region]]:
        """Wait for all peers, then yield their regions, which may be read only inside the context.

        :param layer: index of the model's block, for errors and metrics.
        :raises LostPeerError: if a peer does not set its flag in time.
        """
        assert not self._consumed, "no exchange is outstanding"
        assert not self._unreleased, "a peer's flag was not set"
        buffer = buffer_of(self.epoch)
        flags = {peer: self.layout.flag(buffer, peer) for peer in self._peers}
        with comm_stats.waiting("rows", torch.device("cpu"), layer):
            self.heap.wait(flags, self.epoch, f"layer {layer}, epoch {self.epoch}")
        yield self._incoming[buffer]
        # Not in a finally: an error while the regions are read must not allow another put.
        self._consumed = True

    def close(self) -> None:
        """Free the memory. No view of a region may be in use any more."""
        self._outgoing = self._incoming = []
        self.heap.close()
