"""A symmetric heap of the GPUs of one host, by PyTorch's own symmetric memory.

It needs no other package. Every rank maps every other's memory, so no rank is far. A GPU that does
not see another's memory, or a rank on another host, is refused: there NVSHMEM is for.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from olmo_shard.dispatch.heap.device import DeviceHeap
from olmo_shard.distributed.agree import on_every_rank
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.host_identity import host_identity
from olmo_shard.errors import HeapError

_ALIGNMENT = 128
"""Of the flags behind the arena, in bytes: a line of the GPU's cache."""


class TorchSymmetricHeap(DeviceHeap):
    """See the interface.

    :param group: the ranks, all on one host; collective over them.
    :param device: this rank's GPU.
    :param arena_bytes: of each rank.
    :param num_flags: of each rank.
    :raises HeapError: on every rank, where one of them cannot reach all others' memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, arena_bytes: int, num_flags: int
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.far, self.staging, self.pes, self.bitcode = (), None, None, None
        self._group, self._device = group, device
        host = on_every_rank(group, _host)
        if len(set(gather_objects(host, group))) > 1:
            raise _refusal("the ranks of the group do not share a host and a process namespace")
        flags_at = -(-arena_bytes // _ALIGNMENT) * _ALIGNMENT
        end = flags_at + 8 * num_flags
        memory = on_every_rank(group, lambda: _zeros(end, device))
        self._handle = on_every_rank(group, lambda: _rendezvous(memory, group))
        # Pointers are to the allocations, in which the tensors may begin later.
        starts = gather_objects(memory.data_ptr() - self._handle.buffer_ptrs[self.rank], group)
        pointers = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64)
        self.arena_ptrs = (pointers + torch.tensor(starts)).to(device)
        self.flag_ptrs = self.arena_ptrs + flags_at
        self.arena = memory[:arena_bytes]
        self.flags = memory[flags_at:end].view(torch.int64)

    def close(self) -> None:
        """Closed already, it does nothing."""
        if hasattr(self, "arena"):
            torch.cuda.synchronize(self._device)
            gather_objects(None, self._group)  # nobody frees what a peer may still write to
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
