"""Heaps for kernels that run in the interpreter: the shared memory of processes of one host, or
tensors of one process.
"""

import ctypes
import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.dispatch.heap.device import DeviceHeap
from olmo_shard.dispatch.heap.shared_memory import SharedMemoryHeap
from olmo_shard.dispatch.mailbox import MailboxLayout, Region
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.kernels.put_packed import RemotePeers
from olmo_shard.kernels.regions import Regions
from olmo_shard.kernels.signals import wait_signals


class SharedDeviceHeap(DeviceHeap):
    """Arenas and flags of a ``SharedMemoryHeap``, by address.

    :param far: distances of the ranks that pass for those of another node: with 1, rank r cannot
        store into the memory of rank r + 1.
    """

    bitcode = ""

    def __init__(
        self, group: dist.ProcessGroup, layout: MailboxLayout, far: tuple[int, ...] = ()
    ) -> None:
        timeout = timedelta(seconds=60)
        self._heap = SharedMemoryHeap(group, layout.arena_bytes, layout.num_flags, timeout)
        self.rank, self.size = self._heap.rank, self._heap.size
        self.arena = self._heap.arenas[self.rank]
        every_flag = [
            torch.from_numpy(np.frombuffer(flags, dtype=np.int64)[: layout.num_flags])
            for flags in self._heap._flags
        ]
        self.flags = every_flag[self.rank]
        self.far = tuple(sorted((self.rank + distance) % self.size for distance in far))
        near = torch.ones(self.size, dtype=torch.int64)
        near[list(self.far)] = 0
        self._arena_at = [arena.data_ptr() for arena in self._heap.arenas]
        self._flags_at = [flags.data_ptr() for flags in every_flag]
        self.arena_ptrs = near * torch.tensor(self._arena_at)
        self.flag_ptrs = near * torch.tensor(self._flags_at)
        self.staging = torch.full_like(self.arena, 0xFF) if far else None
        self.pes = torch.arange(self.size, dtype=torch.int32) + 10
        self.arena.fill_(0xFF)
        dist.barrier(group=group)  # nobody puts before the poison is in

    @property
    def targets(self) -> Tensor:
        """int64 [W]: where rows for each rank are stored."""
        staged = 0 if self.staging is None else self.staging.data_ptr()
        return torch.where(self.arena_ptrs == 0, staged, self.arena_ptrs)

    def far_peers(self) -> RemotePeers:
        assert self.staging is not None
        assert self.pes is not None
        return RemotePeers(torch.tensor(self.far), self.pes, self.staging, "")

    def put_with_signal(self, *args: Any, _semantic: Any = None) -> None:
        """Play NVSHMEM's put: addresses of the own symmetric memory mean the same place there."""
        target, source, num_bytes, flag, value, how, pe = (int(each) for each in args)
        assert how == 9, "set the signal"
        peer = pe - 10
        assert peer in self.far
        offset = target - self.arena.data_ptr()
        assert offset >= 0
        assert offset + num_bytes <= self.arena.numel()
        ctypes.memmove(self._arena_at[peer] + offset, source, num_bytes)
        number = (flag - self.flags.data_ptr()) // 8
        torch.from_numpy(np.frombuffer(self._heap._flags[peer], dtype=np.int64))[number] = value

    def close(self) -> None:
        del self.arena, self.flags
        gc.collect()  # the interpreter leaves cycles
        self._heap.close()


ME, RANKS, SLOTS, MOST = 1, 3, 2, 4
"""Of a neighbourhood: the rank that is here, ranks, slots of a row, rows of a region."""


class Neighbourhood(NamedTuple):
    """Arenas and flags of three ranks, as rank 1 sees them."""

    layout: MailboxLayout
    regions: Regions
    arenas: list[Tensor]
    flags: list[Tensor]
    epoch: Tensor

    @property
    def targets(self) -> Tensor:
        return torch.tensor([arena.data_ptr() for arena in self.arenas])

    @property
    def flag_ptrs(self) -> Tensor:
        return torch.tensor([flags.data_ptr() for flags in self.flags])

    def region(self, owner: int, source: int, slot: int) -> Region:
        return self.layout.region(self.arenas[owner], owner, slot, source)

    def wait(
        self, error: Tensor, timeout_ns: int, own_counts: list[int], own_routes: list[int]
    ) -> tuple[list[int], list[int]]:
        counts_W, totals = wait_signals(
            self.flags[ME],
            self.epoch,
            self.arenas[ME],
            torch.tensor(own_counts),
            torch.tensor(own_routes),
            error,
            timeout_ns,
            self.regions,
        )
        return counts_W.tolist(), totals.tolist()

    def arrive(self, source: int, num_rows: int, num_routes: int) -> Region:
        """Write a header and a flag as a peer does; returns the region."""
        epoch = int(self.epoch)
        region = self.region(ME, source, epoch % 2)
        region.num_rows.as_strided((2,), (1,)).copy_(torch.tensor([num_rows, num_routes]))
        self.flags[ME][epoch % 2 * RANKS + source] = epoch
        return region


def neighbourhood(epoch: int, width: int = 1) -> Neighbourhood:
    layout = MailboxLayout(
        num_ranks=RANKS, max_rows=MOST, num_slots=SLOTS, width=width, dtype=torch.float32
    )
    return Neighbourhood(
        layout,
        layout.regions(ME),
        [torch.full((layout.arena_bytes,), 0xFF, dtype=torch.uint8) for _ in range(RANKS)],
        [torch.zeros(layout.num_flags, dtype=torch.int64) for _ in range(RANKS)],
        torch.tensor([epoch]),
    )


def run_alone(rank: Runtime, cases: list[Callable[[], None]]) -> None:
    """In one of several processes of the interpreter."""
    if rank.rank == 0:
        for case in cases:
            case()
