"""Kernels as operators of torch: schemas, fakes, what a compiler traces."""

from typing import Any

import torch

import olmo_shard.kernels.dispatch_plan
import olmo_shard.kernels.expert_layout
import olmo_shard.kernels.route_capacity
import olmo_shard.kernels.sum_pairs  # noqa: F401  (registers the operators)
from tests.support.ranks import Groups


def opcheck_case(_: Any) -> None:
    ops = torch.ops.olmo_shard
    idx = torch.tensor([[3, 0], [2, 3], [-1, 1]])
    weights, labelled = torch.rand(3, 2), torch.tensor([True, False, True])
    local_expert = torch.tensor([[1, 0], [1, -1], [0, -1]], dtype=torch.int32)
    torch.library.opcheck(ops.dispatch_plan, (idx, 2, 2))
    torch.library.opcheck(ops.keep_within_capacity, (idx, weights, labelled, 4, 1.5))
    torch.library.opcheck(ops.expert_layout, (local_expert, 2, 5))
    torch.library.opcheck(ops.sum_pairs, (torch.randn(4, 8), local_expert))


def test_the_kernels_operators_keep_torchs_contract(interpreted: Groups) -> None:
    interpreted(1).run(opcheck_case)
