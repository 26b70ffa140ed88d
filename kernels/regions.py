"""Addresses of the regions of a mailbox, as the kernels compute them.

See [Note: mailbox] in ``olmo_shard/dispatch/mailbox.py``.

Shape letters: W ranks, D width, m slots of a row.

An arena holds 2 buffers of W - 1 regions each, all of equal size. A region consists of, from low to
high addresses::

    weights       FP32  [max_rows, m]
    local_expert  int32 [max_rows, m]     at experts_at
    header        int64 [8]               at header_at: number of rows, number of routes
    rows          [max_rows, D]           at rows_at

All four parts start at multiples of 64 bytes. Epoch n uses buffer n mod 2.

Example: W = 4, and rank 1 writes for rank 3 in epoch 5. The buffer is 5 mod 2 = 1. The place in the
buffer is (1 - 3) mod 4 - 1 = 1. So the region starts (1 x 3 + 1) x region_bytes after the start of
rank 3's arena, and its flag is flag 1 x 4 + 1 = 5 of rank 3.
"""

from typing import NamedTuple

from olmo_shard.kernels.language import tl, triton


class Regions(NamedTuple):
    """Sizes and offsets of a mailbox, which launchers pass to kernels."""

    rank: int
    num_ranks: int
    """W, the ranks of the expert-parallel group."""
    max_rows: int
    """Capacity of a region in rows."""
    num_slots: int
    """m, the largest number of routes per row."""
    width: int
    """D, the elements per row."""
    region_bytes: int
    """Size of a region in bytes."""
    experts_at: int
    """Byte offset of ``local_expert`` from the start of a region."""
    header_at: int
    """Byte offset of the header from the start of a region."""
    rows_at: int
    """Byte offset of the rows from the start of a region."""


@triton.jit
def region_offset(owner, source, buffer, num_ranks, region_bytes):
    """Byte offset of the region of ``source`` in the arena of ``owner``, int64."""
    place = (source - owner + num_ranks) % num_ranks - 1
    return (buffer * (num_ranks - 1) + place).to(tl.int64) * region_bytes
