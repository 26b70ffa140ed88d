"""Which routes capacity keeps, and how many rows a mailbox needs for them."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from olmo_shard.data.labels import IGNORE_INDEX
from olmo_shard.dispatch.mailbox.mailbox_layout import most_rows
from olmo_shard.dispatch.row_plan import make_plan
from olmo_shard.kernels.route_capacity import keep_within_capacity
from olmo_shard.nn.moe import MoE
from tests.support.close import close
from tests.support.dispatch import local_dispatcher
from tests.support.scales import moe_scale
from tests.support.tiny import model_config

Batch = tuple[Tensor, Tensor, Tensor, int]
"""Picks, weights, labels, and the number of experts."""
FACTORS = ["0.1", "0.5", "1", "1.1", "1.25", "2", "4"]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Picks, weights with many ties, labels, and the number of experts."""
    num_experts = draw(st.sampled_from([1, 2, 4, 8]))
    top_k = draw(st.integers(1, num_experts))
    rows = st.permutations(range(num_experts)).map(lambda order: list(order[:top_k]))
    idx = torch.tensor(draw(st.lists(rows, max_size=14)), dtype=torch.int64).view(-1, top_k)
    values = st.lists(st.sampled_from([0.1, 0.2, 0.7]), min_size=idx.numel(), max_size=idx.numel())
    weights = torch.tensor(draw(values)).view(-1, top_k)
    labelled = draw(st.lists(st.booleans(), min_size=len(idx), max_size=len(idx)))
    return idx, weights, torch.tensor(labelled, dtype=torch.bool), num_experts


def expected(batch: Batch, factor: str) -> Tensor:
    """The kept routes, by exact arithmetic and sorting."""
    idx, weights, labelled, num_experts = batch
    top_k = idx.shape[1]
    exact = Fraction(factor) * int(labelled.sum()) * top_k / num_experts
    kept = torch.full_like(idx, -1)
    for expert in range(num_experts):
        routes = [(t, k) for t in range(len(idx)) for k in range(top_k) if idx[t, k] == expert]
        routes.sort(key=lambda tk: (not labelled[tk[0]], -float(weights[tk]), tk[0]))
        for t, k in routes[: math.ceil(exact)]:
            kept[t, k] = expert
    return kept


@settings(max_examples=300, deadline=None)
@given(batches(), st.sampled_from(FACTORS))
def test_the_highest_weights_stay_and_ties_go_by_token(batch: Batch, factor: str) -> None:
    idx, weights, labelled, num_experts = batch
    kept = keep_within_capacity(idx, weights, labelled, num_experts, float(factor))
    assert torch.equal(kept, expected(batch, factor))


@settings(max_examples=200, deadline=None)
@given(batches(), st.sampled_from(FACTORS), st.sampled_from([1, 2, 4]))
def test_no_rank_gets_more_rows_than_a_mailbox_has(
    batch: Batch, factor: str, num_ranks: int
) -> None:
    idx, weights, labelled, num_experts = batch
    if num_experts % num_ranks:
        return
    kept = keep_within_capacity(idx, weights, labelled, num_experts, float(factor))
    most = most_rows(len(idx), idx.shape[1], num_experts, num_ranks, float(factor))
    plan = make_plan(kept, num_ranks, num_experts // num_ranks)
    assert max(plan.send_counts) <= most <= len(idx)
    assert most_rows(len(idx), idx.shape[1], num_experts, num_ranks, None) == len(idx)


@pytest.mark.parametrize(("factor", "capacity"), [(4.0, 4), (0.1, 1), (0.3, 2)])
def test_a_tiny_batch(factor: float, capacity: int) -> None:
    """4 tokens, 2 experts, K = 2: an expert takes at least one route, and at most all."""
    idx = torch.tensor([[0, 1]] * 4)
    weights = torch.tensor([[0.4, 0.1], [0.1, 0.2], [0.3, 0.3], [0.2, 0.4]])
    kept = keep_within_capacity(idx, weights, torch.ones(4, dtype=torch.bool), 2, factor)
    assert (kept == 0).sum() == (kept == 1).sum() == capacity
    if factor == 0.1:
        assert kept.tolist() == [[0, -1], [-1, -1], [-1, -1], [-1, 1]]


def test_a_product_that_is_whole_is_not_rounded_up() -> None:
    """100 x 0.07 is 7.000000000000001 in FP64."""
    idx, labelled = torch.zeros(100, 1, dtype=torch.int64), torch.ones(100, dtype=torch.bool)
    kept = keep_within_capacity(idx, torch.rand(100, 1), labelled, 1, 0.07)
    assert (kept == 0).sum() == most_rows(100, 1, 1, 1, 0.07) == 7


def moe_layer(capacity_factor: float | None, shared: int = 1) -> MoE:
    """A layer of 8 experts with random weights."""
    torch.manual_seed(0)
    config = model_config(moe={"num_shared_experts": shared})
    layer = MoE(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.router.reset_buffers()
    layer.dispatcher = local_dispatcher(8, capacity_factor)
    return layer


def test_a_token_without_a_route_keeps_its_shared_expert_only() -> None:
    layer = moe_layer(0.05)
    x = torch.randn(2, 6, 36, requires_grad=True)
    routes = layer.router(x)
    kept = layer.dispatcher.apply_capacity(
        routes.topk_idx_TK, routes.topk_weights_TK, torch.ones(12, dtype=torch.bool)
    )
    lost = (kept < 0).all(dim=1)
    assert lost.sum() > 2
    out, stats = layer(x, torch.ones(2, 6, dtype=torch.bool))
    assert stats["dropped"] == (kept < 0).sum()
    assert layer.shared_experts is not None
    shared = layer.shared_experts(x).flatten(0, 1)
    assert torch.equal(out.flatten(0, 1)[lost], shared[lost])
    assert not torch.equal(out.flatten(0, 1)[~lost], shared[~lost])


def test_a_dropped_route_has_no_gradient() -> None:
    layer = moe_layer(0.5, shared=0)
    x = torch.randn(1, 12, 36)
    routes = layer.router(x)
    weights = routes.topk_weights_TK.detach().requires_grad_()
    labelled = torch.ones(12, dtype=torch.bool)
    kept = layer.dispatcher.apply_capacity(routes.topk_idx_TK, weights, labelled)
    pending = layer.dispatcher.dispatch(x[0], kept, weights)
    layer.experts(pending).wait().sum().backward()
    assert weights.grad is not None
    assert 0 < (kept < 0).sum() < kept.numel()
    assert torch.equal(weights.grad == 0, kept < 0)


def test_padding_changes_neither_drops_nor_what_is_computed() -> None:
    layer = moe_layer(0.75)
    x = torch.randn(2, 6, 36)
    padded = torch.cat([x, torch.randn(2, 6, 36)], dim=1)
    labels = torch.zeros(2, 12, dtype=torch.int64)
    labels[:, 6:] = IGNORE_INDEX
    out, stats = layer(x, labels[:, :6] != IGNORE_INDEX)
    padded_out, padded_stats = layer(padded, labels != IGNORE_INDEX)
    assert stats["dropped"] == padded_stats["dropped"] > 0
    assert torch.equal(stats["counts_E"], padded_stats["counts_E"])
    scale = moe_scale(layer, x.flatten(0, 1), layer.router(x).topk_idx_TK)
    close(padded_out[:, :6], out, scale=scale.view(x.shape))


def test_without_a_factor_nothing_is_dropped() -> None:
    layer = moe_layer(None)
    _, stats = layer(torch.randn(1, 12, 36), torch.ones(1, 12, dtype=torch.bool))
    assert stats["dropped"] == 0
