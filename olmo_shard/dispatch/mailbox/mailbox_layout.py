"""Mailboxes over a symmetric heap: where rows lie, who writes them, and when they are overwritten.

[Note: mailbox] Words: an *epoch* is one exchange of the group, numbered from 1. For each source,
the arena of a destination has two *buffers* (double buffering); epoch n uses buffer n mod 2. A
*region* is the part of a buffer that one source writes for one destination. In epoch n a rank
writes its rows into its region at every peer (possibly zero rows) and then sets the region's flag
to n. It waits until the flags of all its own regions in that buffer equal n, and reads the regions.
The rank has *consumed* n when it has finished reading.

Why no barrier is needed. A source s writes the region of epoch n + 2 where it wrote the region of
epoch n. It must not do so until destination d has consumed epoch n.

    s writes n + 2  =>  s consumed n + 1         put and consume alternate on each rank
                    =>  s saw d's flag n + 1     a rank waits for the flags of all peers
                    =>  d set the flag n + 1     no other rank sets that flag
                    =>  d consumed n             put and consume alternate on d as well

The second line is why every peer gets a flag, with or without rows. The first and the last line
hold only if put and consume strictly alternate. With two exchanges in flight, or with a put that is
never waited for, rows would be overwritten. So a put asserts that the epoch before was consumed,
and a consume asserts that the put has set the flags of all peers. Two buffers are needed, since a
fast source may write n + 1 while the destination still reads n. By the same argument a flag never
passes the epoch that its reader waits for, so flags are compared for equality.

Shape letters: W ranks, D width, K top-k, E experts, e local experts, m = min(K, e) slots of a row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.distributed.host_memory import format_bytes
from olmo_shard.kernels.regions import Regions
from olmo_shard.kernels.route_capacity import most_routes

NUM_BUFFERS = 2
_ALIGNMENT = 64
"""Alignment in bytes: one cache line, which also satisfies vector stores."""


class Region(NamedTuple):
    """Views of what one source writes for one destination in one epoch."""

    weights: Tensor
    """FP32 [max_rows, m]: router weights in the dispatch direction, their gradients in the combine
    direction."""
    local_expert: Tensor
    """int32 [max_rows, m]: local expert ids, in the dispatch direction only."""
    num_rows: Tensor
    """int64 scalar."""
    rows: Tensor
    """[max_rows, D]."""


@dataclass(frozen=True, kw_only=True)
class MailboxLayout:
    """Sizes of a mailbox, and the places of its regions.

    :param num_ranks: W.
    :param max_rows: largest number of rows in a region.
    :param num_slots: m, the largest number of routes of a row.
    :param width: D.
    :param dtype: type of the rows.
    """

    num_ranks: int
    max_rows: int
    num_slots: int
    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row and its metadata: D x itemsize + 8 m."""
        return self.width * self.dtype.itemsize + 8 * self.num_slots

    @property
    def region_bytes(self) -> int:
        """Bytes of a region, a multiple of the alignment."""
        return sum(self._part_bytes())

    @property
    def arena_bytes(self) -> int:
        """Bytes per rank: 2 buffers x (W - 1) sources x the bytes of a region."""
        return NUM_BUFFERS * (self.num_ranks - 1) * self.region_bytes

    def describe(self) -> str:
        """The formula of the size with its numbers, for logs and errors."""
        return (
            f"mailboxes of {NUM_BUFFERS} buffers x {self.num_ranks - 1} peer(s) x {self.max_rows} "
            f"rows x {self.row_bytes} B = {format_bytes(self.arena_bytes)} per rank"
        )

    @property
    def num_flags(self) -> int:
        """Number of 64-bit flags per rank."""
        return NUM_BUFFERS * self.num_ranks

    def flag(self, buffer: int, source: int) -> int:
        """Index of the flag that ``source`` sets for its region in a buffer."""
        return buffer * self.num_ranks + source

    def regions(self, rank: int) -> Regions:
        """The layout in the form in which Triton kernels take it.

        :param rank: the rank that launches the kernels.
        """
        weights, experts, header, _ = self._part_bytes()
        return Regions(
            rank=rank,
            num_ranks=self.num_ranks,
            max_rows=self.max_rows,
            num_slots=self.num_slots,
            width=self.width,
            region_bytes=self.region_bytes,
            experts_at=weights,
            header_at=weights + experts,
            rows_at=weights + experts + header,
        )

    def region(self, arena: Tensor, owner: int, buffer: int, source: int) -> Region:
        """The region of ``source`` in a buffer of ``owner``'s arena.

        A rank has no region for itself: ``owner`` and ``source`` must differ.
        """
        assert owner != source
        # Sources are numbered by their distance from the owner, so that the owner takes no room.
        place = (source - owner) % self.num_ranks - 1
        start = (buffer * (self.num_ranks - 1) + place) * self.region_bytes
        region = arena[start : start + self.region_bytes]
        weights, local_expert, header, rows = region.split(self._part_bytes())
        return Region(
            weights=self._table(weights, torch.float32, self.num_slots),
            local_expert=self._table(local_expert, torch.int32, self.num_slots),
            num_rows=header.view(torch.int64)[0],
            rows=self._table(rows, self.dtype, self.width),
        )

    def _part_bytes(self) -> list[int]:
        """Bytes of a region's weights, experts, header and rows; each part starts aligned."""
        metadata = _aligned(self.max_rows * self.num_slots * 4)
        rows = _aligned(self.max_rows * self.width * self.dtype.itemsize)
        return [metadata, metadata, _ALIGNMENT, rows]

    def _table(self, part: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        return part.view(dtype)[: self.max_rows * width].view(self.max_rows, width)


def mailbox_layout(
    *,
    num_experts: int,
    top_k: int,
    width: int,
    dtype: torch.dtype,
    num_ranks: int,
    max_tokens: int,
    capacity_factor: float | None = None,
) -> MailboxLayout:
    """The mailboxes of a model's MoE layers, which all layers share.

    :param num_experts: E.
    :param top_k: K.
    :param width: D.
    :param dtype: compute precision.
    :param num_ranks: W.
    :param max_tokens: largest number of tokens per rank and micro-batch.
    """
    max_rows = most_rows(max_tokens, top_k, num_experts, num_ranks, capacity_factor)
    num_slots = min(top_k, num_experts // num_ranks)
    return MailboxLayout(
        num_ranks=num_ranks, max_rows=max_rows, num_slots=num_slots, width=width, dtype=dtype
    )


def most_rows(
    num_tokens: int, top_k: int, num_experts: int, num_ranks: int, capacity_factor: float | None
) -> int:
    """Largest number of rows that a rank sends to another rank.

    :param num_tokens: largest number of tokens per rank and micro-batch.
    """
    if capacity_factor is None:
        return num_tokens
    capacity = most_routes(num_tokens, top_k, num_experts, capacity_factor)
    # A rank has E / W experts. In the worst case no two of the routes share a row.
    return min(num_tokens, capacity * (num_experts // num_ranks))


def buffer_of(epoch: int) -> int:
    """Index of the buffer that an epoch uses."""
    return epoch % NUM_BUFFERS


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
