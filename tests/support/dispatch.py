"""Dispatchers of every transport for tests, with poison where no value may be read."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.dispatch.buffer_pool import BufferPool
from olmo_shard.dispatch.capacity import most_rows
from olmo_shard.dispatch.collective import CollectiveDispatcher
from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.heap.shared_memory import SharedMemoryHeap
from olmo_shard.dispatch.mailbox import Mailbox, MailboxLayout, Region, slot_of
from olmo_shard.dispatch.rowwise import RowwiseDispatcher

TRANSPORTS = ["collective", "rowwise"]


@contextmanager
def dispatcher(
    transport: str,
    group: dist.ProcessGroup,
    *,
    experts: int,
    top_k: int,
    width: int,
    max_tokens: int,
    dtype: torch.dtype = torch.float32,
    capacity_factor: float | None = None,
    timeout: float = 60,
) -> Iterator[TokenDispatcher]:
    """Closed at the end; memory of the rowwise one is full of NaN wherever nothing was written."""
    if transport == "collective":
        yield CollectiveDispatcher(experts, group, capacity_factor)
        return
    layout = MailboxLayout(
        num_ranks=group.size(),
        max_rows=most_rows(max_tokens, top_k, experts, group.size(), capacity_factor),
        num_slots=min(top_k, experts // group.size()),
        width=width,
        dtype=dtype,
    )
    seconds = timedelta(seconds=timeout)
    heap = SharedMemoryHeap(group, layout.arena_bytes, layout.num_flags, seconds)
    heap.arenas[heap.rank].fill_(0xFF)
    dist.barrier(group=group)  # nobody puts before the poison is in
    made = RowwiseDispatcher(experts, PoisonedMailbox(heap, layout), max_tokens, capacity_factor)
    made._rows = PoisonedBuffers(made._rows.num_bytes)
    made._sums = PoisonedBuffers(made._sums.num_bytes)
    try:
        yield made
    finally:
        made.close()


class PoisonedMailbox(Mailbox):
    """Fills what it has consumed with NaN, counts with -1, once no peer can have written again."""

    def put(self, write: Any) -> None:
        regions: dict[int, Region] = self._incoming[slot_of(self.epoch)]
        if self.epoch:
            for region in regions.values():
                for part in region:
                    part.view(torch.uint8).fill_(0xFF) if part.dim() else part.fill_(-1)
        super().put(write)


class PoisonedBuffers(BufferPool):
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return super().empty(shape, dtype).fill_(torch.nan)
