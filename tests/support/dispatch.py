"""Dispatchers of every transport for tests, with poison where no value may be read."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.dispatch.buffer_pool import BufferPool
from olmo_shard.dispatch.collective import CollectiveTransport
from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.heap.shared_memory import SharedMemoryHeap
from olmo_shard.dispatch.local import LocalTransport
from olmo_shard.dispatch.mailbox.mailbox_cpu import CpuMailbox
from olmo_shard.dispatch.mailbox.mailbox_layout import Region, buffer_of, mailbox_layout
from olmo_shard.dispatch.rowwise.rowwise_cpu import RowwiseCpuTransport

TRANSPORTS = ["collective", "rowwise"]


def local_dispatcher(num_experts: int, capacity_factor: float | None = None) -> TokenDispatcher:
    """All experts on one rank: the reference of the other transports."""
    return TokenDispatcher(LocalTransport(), num_experts, capacity_factor)


@contextmanager
def open_dispatcher(
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
    """A dispatcher that is closed at the end.

    The memory of ``rowwise`` is full of NaN wherever nothing was written.
    """
    if transport == "collective":
        yield TokenDispatcher(CollectiveTransport(group), experts, capacity_factor)
        return
    layout = mailbox_layout(
        num_experts=experts,
        top_k=top_k,
        width=width,
        dtype=dtype,
        num_ranks=group.size(),
        max_tokens=max_tokens,
        capacity_factor=capacity_factor,
    )
    seconds = timedelta(seconds=timeout)
    heap = SharedMemoryHeap(group, layout.arena_bytes, layout.num_flags, seconds)
    heap.arenas[heap.rank].fill_(0xFF)
    dist.barrier(group=group)  # no rank puts before the poison is in
    rowwise = RowwiseCpuTransport(PoisonedMailbox(heap, layout), max_tokens)
    rowwise._rows = PoisonedBuffers(rowwise._rows.num_bytes)
    rowwise._sums = PoisonedBuffers(rowwise._sums.num_bytes)
    dispatcher = TokenDispatcher(rowwise, experts, capacity_factor)
    try:
        yield dispatcher
    finally:
        dispatcher.close()


class PoisonedMailbox(CpuMailbox):
    """Fills what it has consumed with NaN, counts with -1, before any peer can write again."""

    def begin_put(self) -> list[tuple[int, Region]]:
        """Poison the consumed regions, then begin an epoch."""
        if self.epoch:
            for region in self._incoming[buffer_of(self.epoch)].values():
                for part in region:
                    part.view(torch.uint8).fill_(0xFF) if part.dim() else part.fill_(-1)
        return super().begin_put()


class PoisonedBuffers(BufferPool):
    """Hands out tensors full of NaN."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor full of NaN."""
        return super().empty(shape, dtype).fill_(torch.nan)
