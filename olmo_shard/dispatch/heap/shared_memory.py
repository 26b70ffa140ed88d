"""A symmetric heap for CPUs: anonymous shared memory of the ranks of one host.

Each rank creates its arena by ``memfd_create``. Its peers open the arena through /proc/PID/fd and
map it, so a put is a plain store. The memory has no name. The kernel frees it with the last process
that maps it, however the processes end. The size of /dev/shm does not matter.

[Note: release and acquire] On x86-64 stores become visible in program order, except for the
streaming stores that a memory copy may use. Loads are not reordered with older loads. So a release
is a full fence followed by a plain aligned 64-bit store, and an acquire is a plain load. Taking a
lock is the fence: its locked instruction also completes streaming stores (Intel SDM vol. 3A, 11.2.2
and 13.3). Copies by torch's worker threads are complete when the operation returns. On processors
with a weaker memory order this would be wrong, so the heap is refused there.
"""

import mmap
import os
import platform
import select
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.dispatch.heap.symmetric_heap import CpuHeap
from olmo_shard.distributed.agree import on_every_rank
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.long_waits import long_waits
from olmo_shard.errors import HeapError, LostPeerError

_FLAG_BYTES = 8
_SPIN_SECONDS = 0.002
"""A wait polls for this long and only yields its core. After that it sleeps between polls."""
_SLEEP_SECONDS = (50e-6, 2e-3)
"""First and longest sleep between two polls."""
_DEATH_CHECK_SECONDS = 0.1
"""Time between two checks whether the peers' processes still run."""


def unsupported() -> str | None:
    """Why this machine cannot have such a heap; ``None`` if it can."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        return f"it needs Linux on x86-64, this is {sys.platform} on {machine}"
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        return "this Python was built without os.memfd_create or os.pidfd_open"
    return None


class SharedMemoryHeap(CpuHeap):
    """See [Note: heap] in ``symmetric_heap.py``. Creating it is collective over the group.

    :param group: ranks that share a host and a process namespace.
    :param arena_bytes: bytes of the arena of each rank.
    :param num_flags: number of flags of each rank.
    :param timeout: longest time that a wait may take.
    :raises HeapError: on every rank, if one of them cannot create or map an arena.
    """

    def __init__(
        self, group: dist.ProcessGroup, arena_bytes: int, num_flags: int, timeout: timedelta
    ) -> None:
        self.rank, self.size, self.timeout = group.rank(), group.size(), timeout
        self._global_ranks = dist.get_process_group_ranks(group)
        self._me = f"rank {self._global_ranks[self.rank]}"
        flag_bytes = -(-num_flags * _FLAG_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        total = flag_bytes + arena_bytes
        # 1. Each rank creates its memory; 2. each rank maps the memory of all ranks.
        with ExitStack() as descriptors:
            arena = on_every_rank(group, lambda: _allocate(total, descriptors))
            places = gather_objects((os.getpid(), arena), group)
            self._pids = [pid for pid, _ in places]
            self._maps = on_every_rank(group, lambda: [_map(*place, total) for place in places])
        # 3. The views of flags and arenas.
        # Only the mappings are left (a mapping of CPython keeps a descriptor of its own), so the
        # memory is freed with the last of them.
        self._flags = [memoryview(mapped)[:flag_bytes].cast("q") for mapped in self._maps]
        self.arenas = [_tensor(mapped, flag_bytes, arena_bytes) for mapped in self._maps]
        self._processes = on_every_rank(group, lambda: _Processes(self._pids, self.rank))
        self._fence = threading.Lock()

    def release(self, peer: int, flag: int, value: int) -> None:
        """See :meth:`CpuHeap.release`."""
        with self._fence:  # see [Note: release and acquire]
            pass
        self._flags[peer][flag] = value

    def wait(self, flags: Mapping[int, int], value: int, what: str) -> None:
        """See :meth:`CpuHeap.wait`."""

        def awaited() -> list[int]:
            """The missing peers, as ranks in the world."""
            missing = self._missing_peers(flags, value, what)
            return [self._global_ranks[peer] for peer in missing]

        with long_waits.watch(what, awaited):
            self._wait(flags, value, what)

    def _wait(self, flags: Mapping[int, int], value: int, what: str) -> None:
        begun = time.monotonic()
        next_check = begun + _DEATH_CHECK_SECONDS
        pause = _SLEEP_SECONDS[0]
        while missing := self._missing_peers(flags, value, what):
            now = time.monotonic()
            # Most waits are shorter than a sleep would be.
            if now - begun < _SPIN_SECONDS:
                os.sched_yield()
                continue
            time.sleep(pause)
            pause = min(2 * pause, _SLEEP_SECONDS[1])
            # Reading the peers' state is a system call, so it is rarer than a poll of the flags.
            if now >= next_check:
                next_check = now + _DEATH_CHECK_SECONDS
                self._check_alive(flags, value, what)
            if now - begun > self.timeout.total_seconds():
                raise LostPeerError(
                    f"{self._me} timed out waiting {self.timeout.total_seconds():g} s for "
                    f"{self._named(missing)}, {what}; if nothing is wrong there, raise "
                    "run.timeout_seconds"
                )

    def close(self) -> None:
        """Free the arena and the mappings.

        :raises BufferError: if a view is still in use. Call ``close`` again when it is gone.
        """
        self.arenas = []
        for flags in self._flags:
            flags.release()
        for mapped in self._maps:
            mapped.close()
        self._processes.close()

    def _missing_peers(self, flags: Mapping[int, int], value: int, what: str) -> list[int]:
        own = self._flags[self.rank]
        missing = []
        for peer, flag in flags.items():
            current = own[flag]
            if current > value:
                raise AssertionError(f"flag {flag} is {current}, ahead of {value}: {what}")
            if current != value:
                missing.append(peer)
        return missing

    def _check_alive(self, flags: Mapping[int, int], value: int, what: str) -> None:
        dead = self._processes.dead()
        # A peer may have set its flag and then ended normally, so read the flags again.
        if lost := [peer for peer in self._missing_peers(flags, value, what) if peer in dead]:
            raise LostPeerError(f"{self._me} lost a peer: {self._named(lost)} ended, {what}")

    def _named(self, peers: list[int]) -> str:
        named = (f"{self._global_ranks[peer]} (process {self._pids[peer]})" for peer in peers)
        return f"rank(s) {', '.join(named)}"


class _Processes:
    """Watches the peers' processes. A zombie (ended, not yet reaped) counts as ended."""

    def __init__(self, pids: list[int], own_rank: int) -> None:
        self._rank_of: dict[int, int] = {}
        self._closing: list[weakref.finalize[..., _Processes]] = []
        self._poll = select.poll()
        for rank, pid in enumerate(pids):
            if rank != own_rank:
                descriptor = _watch(pid)
                self._rank_of[descriptor] = rank
                self._closing.append(weakref.finalize(self, os.close, descriptor))
                self._poll.register(descriptor, select.POLLIN)

    def dead(self) -> set[int]:
        """Ranks whose process has ended."""
        return {self._rank_of[descriptor] for descriptor, _ in self._poll.poll(0)}

    def close(self) -> None:
        """Close the descriptors of the peers' processes."""
        for closing in self._closing:
            closing()


def _watch(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise HeapError(f"cannot watch a peer's process {pid}: {error.strerror}") from error


def _allocate(num_bytes: int, descriptors: ExitStack) -> int:
    """A descriptor of zeroed memory, which is reserved now and not on first use.

    :param descriptors: closes the descriptor.
    """
    try:
        descriptor = os.memfd_create("olmo_shard", os.MFD_CLOEXEC)
        descriptors.callback(os.close, descriptor)
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        raise HeapError(
            f"cannot allocate {num_bytes:,} bytes of shared memory: {error.strerror}"
        ) from error
    return descriptor


def _map(pid: int, descriptor: int, num_bytes: int) -> mmap.mmap:
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise HeapError(f"cannot open {path}, a peer's memory: {error.strerror}") from error
    try:
        return mmap.mmap(opened, num_bytes)
    except OSError as error:
        raise HeapError(f"cannot map {num_bytes:,} bytes: {error.strerror}") from error
    finally:
        os.close(opened)


def _tensor(mapped: mmap.mmap, start: int, num_bytes: int) -> Tensor:
    """A tensor over a part of a mapping.

    NumPy's array in between keeps the mapping from being closed while the tensor is in use.
    """
    return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8, offset=start, count=num_bytes))
