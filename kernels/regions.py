"""Where the regions of a mailbox lie, as kernels compute it (see [Note: mailbox] in
``olmo_shard/dispatch/mailbox.py``).

An arena holds 2 slots x (W - 1) regions of equal size; a region, from low to high addresses::

    weights       FP32  [max_rows, m]
    local_expert  int32 [max_rows, m]     at experts_at
    header        int64 [8]               at header_at: number of rows, number of routes
    rows          [max_rows, D]           at rows_at

All four start on multiples of 64 bytes. Epoch n uses slot n mod 2.

Example: W = 4, rank 1 writes for rank 3 in epoch 5: slot 1, place (1 - 3) mod 4 - 1 = 1, so the
region starts (1 x 3 + 1) x region_bytes behind the start of rank 3's arena, and its flag is number
1 x 4 + 1 = 5 of rank 3's.
"""

from typing import NamedTuple

from olmo_shard.kernels.language import tl, triton


class Regions(NamedTuple):
    """Sizes of a mailbox, on the host: what launchers hand to kernels."""

    rank: int
    num_ranks: int
    """W."""
    max_rows: int
    """Rows of a region at most."""
    num_slots: int
    """m: routes of a row at most."""
    width: int
    """D."""
    region_bytes: int
    experts_at: int
    """Bytes from a region's start, like the next two."""
    header_at: int
    rows_at: int


@triton.jit
def region_offset(owner, source, slot, num_ranks, region_bytes):
    """Bytes from the start of ``owner``'s arena to its region for ``source``, int64."""
    place = (source - owner + num_ranks) % num_ranks - 1
    return (slot * (num_ranks - 1) + place).to(tl.int64) * region_bytes
