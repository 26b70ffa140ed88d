"""Mailboxes whose rows are moved by kernels, on GPUs and in Triton's interpreter.

See [Note: mailbox] in ``mailbox_layout.py``. Put and wait alternate here as well; stream order
makes the kernels between two puts the consumers of the epoch.

The epoch is counted on the device. So no launch depends on a host value that changes from step to
step, and a step can be captured in a CUDA graph.

Shape letters: W ranks of the expert-parallel group.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from olmo_shard.dispatch.heap.symmetric_heap import GpuHeap
from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout
from olmo_shard.distributed.comm_stats import comm_stats
from olmo_shard.errors import LostPeerError
from olmo_shard.kernels.put_packed import RemotePeers, put_packed
from olmo_shard.kernels.signals import AHEAD, signal_peers, wait_signals


class Arrived(NamedTuple):
    """What an exchange brought, on the device."""

    counts_W: Tensor
    """int64 [W]: number of rows from each rank; 0 after a failed wait."""
    totals: Tensor
    """int64 [3]: rows of all ranks, routes of all ranks, number of missing ranks."""


class GpuMailbox:
    """This rank's end of the exchanges of a group.

    An epoch is: ``begin_put``; kernels that write to ``peer_ptrs``; ``end_put``; ``wait``; kernels
    that read the arena.

    :param timeout: longest time that a wait may take.
    :param global_ranks: global ranks of the group, for errors; ``None`` names ranks of the group.
    """

    def __init__(
        self,
        heap: GpuHeap,
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
        """Number of completed puts (device counter)."""
        self.error = torch.zeros(heap.size, dtype=torch.int32, device=device)
        """int32 [W]: what is wrong with a peer's flag, 0 for nothing."""
        self._remote_peers = _remote_peers(heap)
        # Kernels need no branch for remote peers: one table of addresses serves all peers.
        staging = 0 if heap.staging is None else heap.staging.data_ptr()
        self.peer_ptrs = torch.where(heap.arena_ptrs == 0, staging, heap.arena_ptrs)
        """int64 [W]: address to which kernels write for each peer: the peer's arena, or this rank's
        staging buffer if the peer is remote."""
        self._state: Literal["idle", "writing", "sent"] = "idle"

    def begin_put(self) -> None:
        """Begin an epoch. Kernels that write to ``peer_ptrs`` may be launched now."""
        assert self._state == "idle", "an exchange is already outstanding"
        self._state = "writing"

    def end_put(self, counts_W: Tensor, *, with_metadata: bool) -> None:
        """Send what was staged for remote peers, then set the flags of all peers.

        :param counts_W: int64 [W]: number of rows written for each rank.
        :param with_metadata: whether weights or expert ids were written as well.
        """
        assert self._state == "writing", "no put has begun"
        self._state = "sent"
        if self._remote_peers is not None:
            put_packed(
                self._remote_peers,
                counts_W,
                self.heap.arena,
                self.heap.flags,
                self.epoch,
                self.regions,
                self.layout.dtype.itemsize,
                with_metadata=with_metadata,
            )
        # Sets the flags of reachable peers, and raises the epoch for the next put.
        signal_peers(self.heap.flag_ptrs, self.epoch, self.regions)

    def wait(self, layer: int, own_counts_W: Tensor, own_routes_W: Tensor | None = None) -> Arrived:
        """Queue a wait for all peers. Kernels queued after it may read the arena.

        :param layer: index of the model's block, for metrics.
        :param own_counts_W: int64 [W]: element ``rank`` is the number of rows that this rank keeps.
        :param own_routes_W: int64 [W]: element ``rank`` is the number of their routes.
        """
        assert self._state == "sent", "no exchange is outstanding"
        self._state = "idle"
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
        """Raise if a wait has failed. Synchronises with the device.

        :param what: the exchange or the phase that is checked, for errors.
        :raises LostPeerError: naming the ranks that were missing.
        """
        words = self.error.tolist()
        if any(words):
            # A flag can only be ahead if the protocol is broken, which is a bug of ours.
            ahead = [rank for rank, word in enumerate(words) if word == AHEAD]
            assert not ahead, f"flags of ranks {ahead} are ahead of epoch {int(self.epoch)}: {what}"
            missing = [name for name, word in zip(self._names, words, strict=True) if word]
            raise LostPeerError(
                f"rank {self._names[self.heap.rank]} timed out waiting "
                f"{self.timeout.total_seconds():g} s for rank(s) {', '.join(missing)}, {what}; if "
                "nothing is wrong there, raise run.timeout_seconds"
            )

    def close(self) -> None:
        """Free the memory; collective."""
        self.heap.close()


def _remote_peers(heap: GpuHeap) -> RemotePeers | None:
    """The remote peers in the form in which the kernels take them; ``None`` without any."""
    if not heap.remote_ranks:
        return None
    assert heap.staging is not None
    assert heap.pes is not None
    assert heap.bitcode is not None
    ranks = torch.tensor(heap.remote_ranks, device=heap.arena.device)
    return RemotePeers(ranks, heap.pes, heap.staging, heap.bitcode)
