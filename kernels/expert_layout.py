"""Order the (row, local expert) pairs that a rank received by expert.

Shape letters: R rows, m = min(top_k, e) slots of a row, e local experts, P pairs.

Example: three rows with two slots each, -1 marks an empty slot, e = 2::

    local_expert_Rm = [[1, 0],      pairs by (expert, row, slot):
                       [1, -1],       expert 0: row 0 (slot 1)
                       [0, -1]]                 row 2 (slot 0)
                                      expert 1: row 0 (slot 0)
    slot_P = [1, 4, 0, 2]                       row 1 (slot 0)
    counts = [2, 2]                 slot_P indexes the flattened [R, m]; the row is slot_P // m
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertLayout(NamedTuple):
    """The pairs of a rank, ordered by (expert, source rank, row)."""

    slot_P: Tensor
    """int64 [P]: index of the pair into the flattened [R, m] slots."""
    row_P: Tensor
    """int64 [P]: row of the pair."""
    counts: list[int]
    """Pairs of each local expert, length e."""


def expert_layout(local_expert_Rm: Tensor, num_local_experts: int) -> ExpertLayout:
    """Sort pairs by expert; rows come in source order, so a stable sort keeps (source, row) inside.

    :param local_expert_Rm: int32 [R, m], local expert of each slot, -1 where there is none.
    :param num_local_experts: e.
    """
    flat = local_expert_Rm.flatten()
    # Empty slots sort behind the last expert and are cut off.
    key = torch.where(flat < 0, num_local_experts, flat)
    counts = torch.bincount(key, minlength=num_local_experts + 1)[:num_local_experts].tolist()
    slot_P = torch.argsort(key, stable=True)[: sum(counts)]
    slots = local_expert_Rm.shape[1]
    return ExpertLayout(slot_P, slot_P // slots, counts)
