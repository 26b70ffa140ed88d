"""Symmetric heaps of virtual ranks: all ranks of a group in one process, on one device.

The kernels of the ranks run one after the other. They store through tables of peer pointers, as on
a machine with one GPU per rank; here all pointers lead to the memory of one GPU.
"""

import torch
from torch import Tensor

from olmo_shard.dispatch.heap.symmetric_heap import GpuHeap
from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout


class VirtualHeap(GpuHeap):
    """The heap of one virtual rank."""

    def __init__(self, rank: int, arenas: list[Tensor], flags: list[Tensor]) -> None:
        self.rank, self.size = rank, len(arenas)
        self.arenas, self.every_flag = arenas, flags
        self.arena, self.flags = arenas[rank], flags[rank]
        self.arena_ptrs, self.flag_ptrs = _addresses(arenas), _addresses(flags)
        self.remote_ranks, self.staging, self.pes, self.bitcode = (), None, None, None

    def close(self) -> None:
        """Free nothing: the tensors belong to Python."""


def virtual_heaps(layout: MailboxLayout, device: torch.device) -> list[VirtualHeap]:
    """The heaps of all ranks. Arenas are full of the byte 0xFF, so each number in them is NaN."""
    ranks = range(layout.num_ranks)
    sizes = layout.arena_bytes, layout.num_flags
    arenas = [torch.full(sizes[:1], 0xFF, dtype=torch.uint8, device=device) for _ in ranks]
    flags = [torch.zeros(sizes[1:], dtype=torch.int64, device=device) for _ in ranks]
    return [VirtualHeap(rank, arenas, flags) for rank in ranks]


def _addresses(tensors: list[Tensor]) -> Tensor:
    addresses = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor(addresses, dtype=torch.int64, device=tensors[0].device)
