"""The dispatch plan: integers alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from olmo_shard.dispatch.plan import DispatchPlan, make_plan


def test_the_documented_example():
    plan = make_plan(torch.tensor([[3, 0], [2, 3], [-1, 1]]), num_ranks=2, num_local_experts=2)
    assert plan.token_S.tolist() == [0, 2, 0, 1]
    assert plan.send_counts == [2, 2]
    assert plan.local_expert_Sm.tolist() == [[-1, 0], [-1, 1], [1, -1], [0, 1]]
    assert plan.local_expert_Sm.dtype == torch.int32
    assert plan.goes_WT.int().tolist() == [[1, 0, 1], [1, 1, 0]]
    assert plan.slot_TK.tolist() == [[6, 3], [8, 9], [0, 5]]


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Distinct experts of each token, some of them dropped, and the number of experts."""
    num_experts = draw(st.sampled_from([1, 2, 4, 8, 12]))
    top_k = draw(st.integers(1, num_experts))
    rows = st.permutations(range(num_experts)).map(lambda order: list(order[:top_k]))
    idx = torch.tensor(draw(st.lists(rows, max_size=12)), dtype=torch.int64).view(-1, top_k)
    dropped = draw(st.lists(st.booleans(), min_size=idx.numel(), max_size=idx.numel()))
    idx[torch.tensor(dropped, dtype=torch.bool).view(-1, top_k)] = -1
    return idx, num_experts


def routes_of(plan: DispatchPlan, local_experts: int) -> list[tuple[int, int, int]]:
    """(token, global expert, row) of each filled slot, row by row."""
    rank_of_row = [rank for rank, count in enumerate(plan.send_counts) for _ in range(count)]
    found = []
    for row, (rank, slots) in enumerate(
        zip(rank_of_row, plan.local_expert_Sm.tolist(), strict=True)
    ):
        token = int(plan.token_S[row])
        found += [(token, rank * local_experts + e, row) for e in slots if e >= 0]
    return found


@settings(max_examples=300, deadline=None)
@given(routings(), st.data())
def test_each_route_travels_once_and_each_row_once_a_rank(routing, data):
    idx, num_experts = routing
    num_ranks = data.draw(st.sampled_from([d for d in (1, 2, 4, 12) if num_experts % d == 0]))
    local = num_experts // num_ranks
    plan = make_plan(idx, num_ranks, local)

    expected = {(t, e) for t, experts in enumerate(idx.tolist()) for e in experts if e >= 0}
    found = routes_of(plan, local)
    assert len(found) == len(expected)
    assert {(t, e) for t, e, _ in found} == expected
    assert {row for _, _, row in found} == set(range(len(plan.token_S))), "a row without a route"
    for tokens in plan.tokens_of_rank:
        assert tokens.tolist() == sorted(set(tokens.tolist())), "tokens ascend, none twice"
    assert plan.send_counts == [len(tokens) for tokens in plan.tokens_of_rank]
    assert plan.local_expert_Sm.shape[1] == min(idx.shape[1], local)


@settings(max_examples=200, deadline=None)
@given(routings(), st.data())
def test_positions_lead_back_to_where_they_came_from(routing, data):
    idx, num_experts = routing
    num_ranks = data.draw(st.sampled_from([d for d in (1, 2, 4) if num_experts % d == 0]))
    plan = make_plan(idx, num_ranks, num_experts // num_ranks)
    weights = torch.rand(idx.shape) + 0.5
    by_slot = plan.weights_by_slot(weights)
    assert torch.equal(by_slot > 0, plan.local_expert_Sm >= 0)
    assert torch.equal(plan.weights_by_route(by_slot), torch.where(idx >= 0, weights, 0))
    local = num_experts // num_ranks
    for rank, goes_T in enumerate(plan.goes_WT):
        goes = ((idx >= rank * local) & (idx < (rank + 1) * local)).any(dim=1)
        assert torch.equal(goes_T, goes)
        assert torch.equal(plan.tokens_of_rank[rank], goes.nonzero()[:, 0])


def test_no_tokens():
    plan = make_plan(torch.zeros(0, 2, dtype=torch.long), num_ranks=2, num_local_experts=2)
    assert plan.token_S.shape == (0,)
    assert plan.send_counts == [0, 0]
    assert plan.local_expert_Sm.shape == (0, 2)


@pytest.mark.parametrize("local", [1, 2])
def test_one_hot_expert_sends_one_row_a_token(local):
    plan = make_plan(torch.full((5, 1), 3), num_ranks=4 // local, num_local_experts=local)
    assert plan.send_counts == [*[0] * (4 // local - 1), 5]
    assert plan.local_expert_Sm.flatten().tolist() == [3 % local] * 5
