"""Virtual ranks: the mailboxes of a whole group in one process, on one device.

The kernels of rank 0, 1, .. run one after the other and store through tables of pointers as on a
machine with as many GPUs; only the pointers lead to the same memory.
"""

import torch
from torch import Tensor

from olmo_shard.dispatch.heap.symmetric_heap import GpuHeap
from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout


class VirtualHeap(GpuHeap):
    """One rank's end of it."""

    def __init__(self, rank: int, arenas: list[Tensor], flags: list[Tensor]) -> None:
        self.rank, self.size = rank, len(arenas)
        self.arenas, self.every_flag = arenas, flags
        self.arena, self.flags = arenas[rank], flags[rank]
        self.arena_ptrs, self.flag_ptrs = _addresses(arenas), _addresses(flags)
        self.remote_ranks, self.staging, self.pes, self.bitcode = (), None, None, None

    def close(self) -> None:
        """Nothing to give back."""


def virtual_heaps(layout: MailboxLayout, device: torch.device) -> list[VirtualHeap]:
    """Those of all ranks; arenas are full of 0xFF, which is NaN."""
    ranks = range(layout.num_ranks)
    sizes = layout.arena_bytes, layout.num_flags
    arenas = [torch.full(sizes[:1], 0xFF, dtype=torch.uint8, device=device) for _ in ranks]
    flags = [torch.zeros(sizes[1:], dtype=torch.int64, device=device) for _ in ranks]
    return [VirtualHeap(rank, arenas, flags) for rank in ranks]


def _addresses(tensors: list[Tensor]) -> Tensor:
    addresses = [each.data_ptr() for each in tensors]
    return torch.tensor(addresses, dtype=torch.int64, device=tensors[0].device)
