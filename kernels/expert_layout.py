"""Order the received (row, local expert) pairs by expert.

Shape letters: R rows, m = min(top_k, e) slots of a row, e local experts, P pairs.

Example: three rows with two slots each, -1 marks an empty slot, e = 2::

    local_expert_Rm = [[1, 0],      pairs by (expert, row, slot):
                       [1, -1],       expert 0: row 0 (slot 1)
                       [0, -1]]                 row 2 (slot 0)
                                      expert 1: row 0 (slot 0)
    slot_P  = [1, 4, 0, 2]                      row 1 (slot 0)
    row_P   = [0, 2, 0, 1]          slot_P indexes the flattened [R, m]; the row is slot_P // m
    offsets = [0, 2, 4]             expert i has the pairs offsets[i] to offsets[i + 1] - 1
    pair_Rm = [[2, 0],
               [3, -1],
               [1, -1]]

The kernels cut the slots into chunks. The cell of expert i and chunk c has the number
i x chunks + c, so the number of pairs before a cell is a sum over all cells with a lower number.
The first launch counts the pairs of each cell, and the second one writes the lists.

Bytes moved: reads 4 x R x m twice per expert (all but the first read hit the L2 cache), writes
16 P + 4 R m.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_shard.kernels.backend import Backend
from olmo_shard.kernels.language import tl, triton

SLOTS = 1024
"""Slots per iteration of a program."""
WARPS = 8
"""Warps per program of the second launch. With 4 warps a thread needs twice the registers."""
CELLS = 4096
"""Largest number of cells (expert, chunk): each program of the second launch reads all counts."""


class ExpertLayout(NamedTuple):
    """The pairs that a rank received, ordered by (expert, row, slot)."""

    slot_P: Tensor
    """int64 [P]: slot of each pair in the flattened [R, m]; -1 after the last pair."""
    row_P: Tensor
    """int64 [P]: row of each pair; -1 after the last pair."""
    offsets: Tensor
    """int32 [e + 1]: first pair of each local expert; the last entry is the number of pairs."""
    pair_Rm: Tensor
    """int32 [R, m]: pair of each slot; -1 in empty slots."""


@triton.jit(do_not_specialize=["num_slots", "pieces"])
def _count_kernel(local_expert_ptr, pairs_ptr, num_slots, pieces, SLOTS: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    pairs = tl.zeros([SLOTS], tl.int32)
    for piece in range(pieces):
        slot = (chunk * pieces + piece) * SLOTS + tl.arange(0, SLOTS)
        in_slot = tl.load(local_expert_ptr + slot, mask=slot < num_slots, other=-1)
        pairs += (in_slot == expert).to(tl.int32)
    tl.store(pairs_ptr + expert * tl.num_programs(1) + chunk, tl.sum(pairs, axis=0))


@triton.jit(do_not_specialize=["num_slots", "max_pairs", "pieces"])
def _write_kernel(
    local_expert_ptr,
    pairs_ptr,
    slot_ptr,
    row_ptr,
    offsets_ptr,
    pair_ptr,
    num_slots,
    max_pairs,
    pieces,
    SLOTS_OF_ROW: tl.constexpr,
    SLOTS: tl.constexpr,
    CELLS: tl.constexpr,
):
    # Phase 1: the first pair of this program's cell, from the counts of all cells before it.
    expert = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    num_chunks = tl.num_programs(1)
    num_experts = tl.num_programs(0).to(tl.int64)
    num_cells = num_experts * num_chunks
    own_cell = expert * num_chunks + chunk
    cell = tl.arange(0, CELLS)
    pairs = tl.load(pairs_ptr + cell, mask=cell < num_cells, other=0)
    num_pairs = tl.sum(pairs, axis=0).to(tl.int64)
    next_pair = tl.sum(tl.where(cell < own_cell, pairs, 0), axis=0).to(tl.int64)
    if chunk == 0:
        tl.store(offsets_ptr + expert, tl.minimum(next_pair, max_pairs).to(tl.int32))
        if own_cell == 0:
            last = tl.minimum(num_pairs, max_pairs).to(tl.int32)
            tl.store(offsets_ptr + num_experts, last)

    # Phase 2: the pairs of this cell, in slot order. Pairs after ``max_pairs`` are left out.
    for piece in range(pieces):
        slot = (chunk * pieces + piece) * SLOTS + tl.arange(0, SLOTS)
        in_slot = tl.load(local_expert_ptr + slot, mask=slot < num_slots, other=-2)
        here = in_slot == expert
        pair = next_pair + tl.cumsum(here.to(tl.int32), axis=0) - 1
        next_pair += tl.sum(here.to(tl.int32), axis=0)
        fits = pair < max_pairs
        tl.store(slot_ptr + pair, slot, mask=here & fits)
        tl.store(row_ptr + pair, slot // SLOTS_OF_ROW, mask=here & fits)
        tl.store(pair_ptr + slot, tl.where(fits, pair, -1).to(tl.int32), mask=here)
        # The programs of expert 0 together read every slot once, so they mark the empty ones.
        if own_cell < num_chunks:
            tl.store(pair_ptr + slot, tl.full([SLOTS], -1, tl.int32), mask=in_slot == -1)

    # Phase 3: all programs together fill the lists with -1 after the last pair.
    first = num_pairs + own_cell * SLOTS
    nothing = tl.full([SLOTS], -1, tl.int64)
    while first < max_pairs:
        pair = first + tl.arange(0, SLOTS)
        tl.store(slot_ptr + pair, nothing, mask=pair < max_pairs)
        tl.store(row_ptr + pair, nothing, mask=pair < max_pairs)
        first += num_cells * SLOTS


def _empty_layout(like: Tensor, num_local_experts: int, max_pairs: int) -> ExpertLayout:
    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=like.device)

    return ExpertLayout(
        slot_P=empty(max_pairs, dtype=torch.int64),
        row_P=empty(max_pairs, dtype=torch.int64),
        offsets=empty(num_local_experts + 1, dtype=torch.int32),
        pair_Rm=empty(*like.shape, dtype=torch.int32),
    )


@torch.library.custom_op("olmo_shard::expert_layout", mutates_args=())
def _expert_layout_op(
    local_expert_Rm: Tensor, num_local_experts: int, max_pairs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, slots_of_row = local_expert_Rm.shape
    num_slots = num_rows * slots_of_row
    assert max(num_slots, max_pairs) < 2**31, "pairs are stored in 32 bits"
    assert num_local_experts <= CELLS
    num_pieces = max(1, -(-num_slots // SLOTS))
    pieces = -(-num_pieces // (CELLS // num_local_experts))
    grid = (num_local_experts, -(-num_pieces // pieces))

    layout = _empty_layout(local_expert_Rm, num_local_experts, max_pairs)
    pairs = torch.empty(grid, dtype=torch.int32, device=local_expert_Rm.device)
    local_expert_Rm = local_expert_Rm.contiguous()
    _count_kernel[grid](local_expert_Rm, pairs, num_slots, pieces, SLOTS=SLOTS)
    _write_kernel[grid](
        local_expert_Rm,
        pairs,
        *layout,
        num_slots,
        max_pairs,
        pieces,
        SLOTS_OF_ROW=slots_of_row,
        SLOTS=SLOTS,
        CELLS=CELLS,
        num_warps=WARPS,
    )
    return tuple(layout)


@_expert_layout_op.register_fake
def _(local_expert_Rm: Tensor, num_local_experts: int, max_pairs: int) -> ExpertLayout:
    return _empty_layout(local_expert_Rm, num_local_experts, max_pairs)


def expert_layout_triton(
    local_expert_Rm: Tensor, num_local_experts: int, max_pairs: int
) -> ExpertLayout:
    """Order the pairs in two launches without synchronising.

    Arguments as for :func:`expert_layout`.
    """
    return ExpertLayout(*_expert_layout_op(local_expert_Rm, num_local_experts, max_pairs))


def expert_layout_ref(
    local_expert_Rm: Tensor, num_local_experts: int, max_pairs: int | None
) -> ExpertLayout:
    """Order the pairs in plain torch, by a stable sort; arguments as for :func:`expert_layout`."""
    flat = local_expert_Rm.flatten()
    # A stable sort keeps the order (row, slot) per expert. Empty slots sort after the last expert.
    # On a CPU bytes sort in a third of the time of int32; as a byte, -1 becomes 255.
    small = num_local_experts <= 255
    key = flat.to(torch.uint8) if small else torch.where(flat < 0, num_local_experts, flat)
    counts = torch.bincount(key, minlength=num_local_experts + 1)[:num_local_experts]
    offsets = F.pad(counts.cumsum(0), (1, 0))
    num_pairs = int(offsets[-1])
    slot_P = torch.argsort(key, stable=True)[:num_pairs]
    pair = torch.full_like(flat, -1)
    pair.scatter_(0, slot_P, torch.arange(num_pairs, dtype=pair.dtype, device=flat.device))
    if max_pairs is not None:
        assert num_pairs <= max_pairs, f"{num_pairs} pairs, room for {max_pairs}"
        slot_P = F.pad(slot_P, (0, max_pairs - num_pairs), value=-1)
    row_P = slot_P // local_expert_Rm.shape[1]  # rounded down: -1 stays -1
    return ExpertLayout(slot_P, row_P, offsets.int(), pair.view_as(local_expert_Rm))


def expert_layout(
    local_expert_Rm: Tensor,
    num_local_experts: int,
    max_pairs: int | None = None,
    backend: Backend = "reference",
) -> ExpertLayout:
    """Order the pairs by expert. The pairs of an expert keep the order of their rows.

    :param local_expert_Rm: int32 [R, m]: local expert of each slot, -1 in empty slots.
    :param num_local_experts: e.
    :param max_pairs: P, the length of the lists; R x m always suffices. ``None`` makes lists as
        long as the number of pairs, which synchronises with the device; Triton needs a number. If
        there are more pairs, an assertion of the reference fails. Triton leaves the last pairs out
        of all lists, as if their slots were empty, since it cannot raise.
    :param backend: ``triton`` or ``reference``.
    """
    if backend == "reference":
        return expert_layout_ref(local_expert_Rm, num_local_experts, max_pairs)
    assert max_pairs is not None, "the number of pairs is known on the device alone"
    return expert_layout_triton(local_expert_Rm, num_local_experts, max_pairs)
