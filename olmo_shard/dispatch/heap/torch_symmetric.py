"""A symmetric heap of the GPUs of one host: PyTorch's own symmetric memory.

It needs no other package. Every rank maps the memory of all other ranks, so every peer is reachable
by load and store. GPUs without peer access, and ranks on other hosts, are refused; use NVSHMEM for
those.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from olmo_shard.dispatch.heap.symmetric_heap import GpuHeap
from olmo_shard.distributed.agree import on_every_rank
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.host_identity import host_identity
from olmo_shard.errors import HeapError

_ALIGNMENT = 128
"""Alignment in bytes of the flags, which follow the arena: one line of the GPU's cache."""


def unsupported(device: torch.device) -> str | None:
    """Why this rank cannot have such a heap; ``None`` if nothing is missing. Allocates nothing.

    Peer access shows only when the heap is created.
    """
    if device.type != "cuda":
        return f"PyTorch's symmetric memory is for GPUs, this is a run on {device.type}"
    return None


class TorchSymmetricHeap(GpuHeap):
    """See :class:`GpuHeap`. Creating it is collective over the group.

    :param group: the ranks, all on one host.
    :param device: this rank's GPU.
    :param arena_bytes: bytes of the arena of each rank.
    :param num_flags: number of flags of each rank.
    :raises HeapError: on every rank, if one of them cannot reach the memory of all others.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, arena_bytes: int, num_flags: int
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.remote_ranks, self.staging, self.pes, self.bitcode = (), None, None, None
        self._group, self._device = group, device
        host = on_every_rank(group, _host)
        if len(set(gather_objects(host, group))) > 1:
            raise _refusal("the ranks of the group do not share a host and a process namespace")
        # Arena and flags share one allocation, so one rendezvous maps both.
        flags_at = -(-arena_bytes // _ALIGNMENT) * _ALIGNMENT
        end = flags_at + 8 * num_flags
        memory = on_every_rank(group, lambda: _zeros(end, device))
        self._handle = on_every_rank(group, lambda: _rendezvous(memory, group))
        # Each pointer leads to an allocation, in which the rank's tensor may start later.
        starts = gather_objects(memory.data_ptr() - self._handle.buffer_ptrs[self.rank], group)
        pointers = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64)
        self.arena_ptrs = (pointers + torch.tensor(starts)).to(device)
        self.flag_ptrs = self.arena_ptrs + flags_at
        self.arena = memory[:arena_bytes]
        self.flags = memory[flags_at:end].view(torch.int64)

    def close(self) -> None:
        """Free the memory; collective. Calling it again does nothing."""
        if hasattr(self, "arena"):
            torch.cuda.synchronize(self._device)
            # A barrier: a peer may still write to this rank's memory before it.
            gather_objects(None, self._group)
            del self.arena, self.flags, self.arena_ptrs, self.flag_ptrs, self._handle


def _refusal(problem: str) -> HeapError:
    return HeapError(
        f"PyTorch's symmetric memory cannot be used: {problem}; parallel.symmetric_heap: nvshmem "
        "reaches other hosts, parallel.dispatch: collective needs neither"
    )


def _host() -> tuple[str, int]:
    try:
        return host_identity()
    except OSError as error:
        raise _refusal(f"cannot read {error.filename}: {error.strerror}") from error


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    backend = symmetric_memory.get_backend(device)
    if backend != "CUDA":
        raise _refusal(f"the backend of symmetric memory is {backend}, not CUDA")
    try:
        memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        # Zero before the rendezvous: no peer can put earlier.
        memory.zero_()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise _refusal(f"cannot allocate {num_bytes:,} bytes on {device}: {error}") from error
    return memory


def _rendezvous(memory: Tensor, group: dist.ProcessGroup) -> Any:
    try:
        handle = symmetric_memory.rendezvous(memory, group)
    except RuntimeError as error:
        raise _refusal(f"the GPUs of the group cannot map each other's memory: {error}") from error
    if not all(handle.buffer_ptrs):
        raise _refusal(f"some GPUs of the group have no mapping here: {handle.buffer_ptrs}")
    return handle
