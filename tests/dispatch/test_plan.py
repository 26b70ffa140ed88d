"""The dispatch plan: integers alone. Runs in CI."""

import pytest
import torch

from olmo_shard.dispatch.plan import make_plan


def test_the_documented_example():
    plan = make_plan(torch.tensor([[3, 0], [2, 3]]), num_ranks=2, num_local_experts=2)
    assert plan.token_S.tolist() == [0, 0, 1]
    assert plan.send_counts_W.tolist() == [1, 2]
    assert plan.route_Sm.tolist() == [[1, -1], [0, -1], [2, 3]]
    assert plan.local_expert_Sm.tolist() == [[0, -1], [1, -1], [0, 1]]
    assert plan.local_expert_Sm.dtype == torch.int32


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_each_route_travels_once_and_each_row_once_a_rank(num_ranks, top_k):
    experts, tokens = 8, 50
    generator = torch.Generator().manual_seed(top_k)
    topk_idx = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k]
    plan = make_plan(topk_idx, num_ranks, experts // num_ranks)
    starts = [0, *plan.send_counts_W.cumsum(0).tolist()]
    seen: list[int] = []
    for rank in range(num_ranks):
        rows = range(starts[rank], starts[rank + 1])
        sent = plan.token_S[rows.start : rows.stop].tolist()
        assert sent == sorted(set(sent)), "tokens of a destination ascend, none twice"
        for row in rows:
            routes = [r for r in plan.route_Sm[row].tolist() if r >= 0]
            assert routes, "a row without a route"
            assert routes == sorted(routes)
            for slot, route in enumerate(routes):
                assert route // top_k == plan.token_S[row]
                expert = int(plan.local_expert_Sm[row, slot]) + rank * (experts // num_ranks)
                assert expert == topk_idx.flatten()[route]
            seen += routes
    assert sorted(seen) == list(range(tokens * top_k))


def test_no_tokens():
    plan = make_plan(torch.zeros(0, 2, dtype=torch.long), num_ranks=2, num_local_experts=2)
    assert plan.token_S.shape == (0,)
    assert plan.send_counts_W.tolist() == [0, 0]
    assert plan.route_Sm.shape == (0, 2)


def test_one_hot_expert_sends_one_row_a_token():
    plan = make_plan(torch.full((5, 1), 3), num_ranks=4, num_local_experts=1)
    assert plan.send_counts_W.tolist() == [0, 0, 0, 5]
    assert plan.local_expert_Sm.flatten().tolist() == [0] * 5
