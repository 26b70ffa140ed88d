"""Mailboxes whose rows kernels move: on GPUs, and in Triton's interpreter. See [Note: mailbox] in
``mailbox.py``; put and wait alternate here likewise.

The epoch is counted on the device, so that no launch depends on a number of the host that changes
from step to step, and a step can be captured in a CUDA graph.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.dispatch.heap.device import DeviceHeap
from olmo_shard.dispatch.mailbox import MailboxLayout
from olmo_shard.distributed.comm_stats import comm_stats
from olmo_shard.errors import LostPeerError
from olmo_shard.kernels.put_packed import RemotePeers, put_packed
from olmo_shard.kernels.signals import AHEAD, signal_peers, wait_signals


class Arrived(NamedTuple):
    """What an exchange brought, on the device."""

    counts_W: Tensor
    """int64: rows from each rank; 0 after a failed wait."""
    totals: Tensor
    """int64 [3]: rows and routes of all ranks, and how many ranks were missing."""


class DeviceMailbox:
    """This rank's end of the exchanges of a group.

    :param timeout: how long a wait may take.
    :param global_ranks: of the group's ranks, for messages; null names them as the group does.
    """

    def __init__(
        self,
        heap: DeviceHeap,
        layout: MailboxLayout,
        timeout: timedelta,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        self.heap, self.layout, self.timeout = heap, layout, timeout
        in_group = [f"{rank} of the group" for rank in range(heap.size)]
        self._names = in_group if global_ranks is None else [str(rank) for rank in global_ranks]
        self.regions = layout.regions(heap.rank)
        device = heap.arena.device
        self.epoch = torch.zeros(1, dtype=torch.int64, device=device)
        """Puts that were finished."""
        self.error = torch.zeros(heap.size, dtype=torch.int32, device=device)
        """What was wrong with a peer's flag; 0: nothing."""
        self._far = _far_peers(heap)
        staged = 0 if heap.staging is None else heap.staging.data_ptr()
        self.targets = torch.where(heap.arena_ptrs == 0, staged, heap.arena_ptrs)
        """int64 [W]: where to store for each peer: its arena, or this rank's staging memory."""
        self._outstanding = False

    def put(self, fill: Callable[[], None], counts_W: Tensor, *, with_metadata: bool) -> None:
        """Begin an epoch: ``fill()`` stores at all targets, then their flags follow.

        :param counts_W: int64: rows for each rank.
        """
        assert not self._outstanding, "an exchange is already outstanding"
        self._outstanding = True
        fill()
        if self._far is not None:
            put_packed(
                self._far,
                counts_W,
                self.heap.arena,
                self.heap.flags,
                self.epoch,
                self.regions,
                self.layout.dtype.itemsize,
                with_metadata=with_metadata,
            )
        signal_peers(self.heap.flag_ptrs, self.epoch, self.regions)

    def wait(self, layer: int, own_counts_W: Tensor, own_routes_W: Tensor | None = None) -> Arrived:
        """Queue the wait for all peers; what is queued behind it may read the arena.

        :param layer: whose rows are exchanged, for figures.
        :param own_counts_W: int64: element ``rank`` counts the rows that this rank keeps.
        """
        assert self._outstanding, "no exchange is outstanding"
        self._outstanding = False
        with comm_stats.waiting("rows", self.error.device, layer):
            counts_W, totals = wait_signals(
                self.heap.flags,
                self.epoch,
                self.heap.arena,
                own_counts_W,
                own_routes_W,
                self.error,
                int(self.timeout.total_seconds() * 1e9),
                self.regions,
            )
        return Arrived(counts_W, totals)

    def check(self, what: str) -> None:
        """Wait for the device, and see whether a wait has failed.

        :raises LostPeerError: naming the ranks that were missing.
        """
        words = self.error.tolist()
        if any(words):
            ahead = [rank for rank, word in enumerate(words) if word == AHEAD]
            assert not ahead, f"flags of ranks {ahead} are ahead of epoch {int(self.epoch)}: {what}"
            missing = [name for name, word in zip(self._names, words, strict=True) if word]
            raise LostPeerError(
                f"rank {self._names[self.heap.rank]} timed out waiting "
                f"{self.timeout.total_seconds():g} s for rank(s) {', '.join(missing)}, {what}; if "
                "nothing is wrong there, raise run.timeout_seconds"
            )

    def close(self) -> None:
        self.heap.close()


def _far_peers(heap: DeviceHeap) -> RemotePeers | None:
    if not heap.far:
        return None
    assert heap.staging is not None
    assert heap.pes is not None
    assert heap.bitcode is not None
    ranks_F = torch.tensor(heap.far, device=heap.arena.device)
    return RemotePeers(ranks_F, heap.pes, heap.staging, heap.bitcode)
