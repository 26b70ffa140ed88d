"""Adding the rows of a token: both ways, in rank order, in FP32."""

import pytest
import torch

from olmo_shard.dispatch import sum_rows as module
from olmo_shard.dispatch.plan import DispatchPlan, make_plan
from olmo_shard.dispatch.sum_rows import sum_rows


def plan_of(density: float, num_ranks: int = 3, tokens: int = 150) -> DispatchPlan:
    """One expert a rank; some tokens go nowhere."""
    generator = torch.Generator().manual_seed(int(density * 100))
    goes = torch.rand(tokens, num_ranks, generator=generator) < density
    return make_plan(torch.where(goes, torch.arange(num_ranks), -1), num_ranks, 1)


def one_by_one(rows_of_rank: list[torch.Tensor], plan: DispatchPlan) -> torch.Tensor:
    out = torch.zeros(plan.num_tokens, rows_of_rank[0].shape[1])
    for tokens, rows in zip(plan.tokens_of_rank, rows_of_rank, strict=True):
        for token, row in zip(tokens.tolist(), rows, strict=True):
            out[token] += row.float()
    return out.to(rows_of_rank[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens_a_piece", [1, 10**9])
@pytest.mark.parametrize("density", [0.0, 0.05, 0.5, 0.97, 1.0])
def test_both_ways_give_the_bits_of_adding_one_by_one(monkeypatch, tokens_a_piece, density, dtype):
    monkeypatch.setattr(module, "_TOKENS_A_PIECE", tokens_a_piece)
    plan = plan_of(density)
    rows = [torch.randn(count, 5).to(dtype) for count in plan.send_counts]
    poisoned = torch.full((plan.num_tokens, 5), torch.nan)
    found = sum_rows(rows, plan, poisoned)
    assert torch.equal(found, one_by_one(rows, plan))
    strided = [torch.stack([each, each], dim=2)[:, :, 0] for each in rows]
    assert torch.equal(sum_rows(strided, plan), found)


def test_rows_of_a_token_are_added_in_fp32():
    """256 + 1 + 1 + 1 from four ranks: added in bf16, each 1 would be lost."""
    plan = make_plan(torch.tensor([[0, 1, 2, 3]]), num_ranks=4, num_local_experts=1)
    rows = torch.tensor([[[256.0]], [[1.0]], [[1.0]], [[1.0]]], dtype=torch.bfloat16)
    assert sum_rows(list(rows), plan).item() == 260.0  # 259 rounded to bf16


def test_no_tokens():
    plan = make_plan(torch.zeros(0, 2, dtype=torch.int64), num_ranks=2, num_local_experts=1)
    assert sum_rows([torch.zeros(0, 5), torch.zeros(0, 5)], plan).shape == (0, 5)
