"""Each transport equals ``local``: rows bitwise, outputs and all gradients to FP32 rounding.

Runs on gloo, in CI. Every rank has its own tokens; the reference runs all experts on one rank.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from olmo_shard.dispatch.collective import CollectiveDispatcher
from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.exchange import DispatchHandle, sum_rows
from olmo_shard.dispatch.local import LocalDispatcher
from olmo_shard.dispatch.plan import make_plan
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.kernels.expert_layout import expert_layout
from olmo_shard.kernels.grouped_mlp import grouped_mlp
from tests.support.ranks import mesh_of

EXPERTS, WIDTH, HIDDEN = 8, 12, 10


def routing(kind: str, rank: int, tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Distinct experts of each token, and weights."""
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if kind == "skewed":
        scores[:, 0] += 1
    elif kind == "one_hot":
        scores += torch.arange(EXPERTS, 0, -1) * 10
    elif kind == "last_rank_only":
        scores[:, -top_k:] += 10
    topk_idx = scores.argsort(dim=1, descending=True)[:, :top_k]
    return topk_idx, torch.rand(tokens, top_k, generator=generator) + 0.1


def expert_weights(requires_grad: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(99)
    w_gate_up = torch.randn(EXPERTS, 2 * HIDDEN, WIDTH, generator=generator) * 0.3
    w_down = torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator) * 0.3
    return w_gate_up.requires_grad_(requires_grad), w_down.requires_grad_(requires_grad)


def layer(
    dispatcher: TokenDispatcher, x: Tensor, idx: Tensor, weights: Tensor, experts: Any
) -> Tensor:
    rows = dispatcher.finish(dispatcher.start(x, idx, weights))
    w_gate_up, w_down = experts
    layout = expert_layout(rows.local_expert_Rm, w_gate_up.shape[0])
    weight_P = rows.weights_Rm.flatten()[layout.slot_P]
    y_RD = grouped_mlp(rows.x_RD, weight_P, w_gate_up, w_down, layout)
    return dispatcher.combine(y_RD, rows.handle)


def equality_case(rank: Runtime, kind: str, tokens: list[int], top_k: int, how: str) -> None:
    mesh = mesh_of(rank, rank.world_size)
    own = mesh.local_experts(EXPERTS)
    dispatcher = CollectiveDispatcher(EXPERTS, mesh.ep)
    everyone = []
    for other in range(rank.world_size):
        generator = torch.Generator().manual_seed(1000 + other)
        x = torch.randn(tokens[other], WIDTH, generator=generator)
        dout = torch.randn(tokens[other], WIDTH, generator=generator)
        everyone.append((x, dout, *routing(kind, other, tokens[other], top_k)))
    x, dout, idx, weights = everyone[rank.rank]
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    experts = [w.detach()[own.start : own.stop].clone().requires_grad_() for w in expert_weights()]
    out = layer(dispatcher, x, idx, weights, experts)
    out.backward(shaped(dout, how))

    whole = expert_weights()
    for other, (x_ref, dout_ref, idx_ref, weights_ref) in enumerate(everyone):
        x_ref, weights_ref = x_ref.clone().requires_grad_(), weights_ref.clone().requires_grad_()
        out_ref = layer(LocalDispatcher(EXPERTS), x_ref, idx_ref, weights_ref, whole)
        out_ref.backward(shaped(dout_ref, how).contiguous())
        if other == rank.rank:
            close(out, out_ref)
            close(x.grad, x_ref.grad)
            close(weights.grad, weights_ref.grad)
    for mine, reference in zip(experts, whole, strict=True):
        assert reference.grad is not None
        close(mine.grad, reference.grad[own.start : own.stop])


def shaped(dout: Tensor, how: str) -> Tensor:
    """A gradient of that memory layout."""
    return {
        "plain": dout,
        "stride-0": torch.ones(1, 1).expand_as(dout),
        "transposed": dout.T.contiguous().T,
        "sliced": torch.cat([dout, dout], dim=1)[:, ::2],
    }[how]


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    if expected.numel():
        peak = max(1e-9, expected.abs().max().item())
        assert (found - expected).abs().max().item() <= 1e-6 * peak


@pytest.mark.parametrize("kind", ["uniform", "skewed", "one_hot", "last_rank_only"])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_collective_equals_local(ranks, kind, top_k):
    ranks(4).run(equality_case, kind, [20, 1, 0, 33], top_k, "plain")


def test_no_tokens_at_all(ranks):
    ranks(2).run(equality_case, "uniform", [0, 0], 2, "plain")


@pytest.mark.parametrize("how", ["stride-0", "transposed", "sliced"])
def test_gradients_that_are_not_contiguous(ranks, how):
    ranks(4).run(equality_case, "uniform", [7, 7, 7, 7], 2, how)


def rows_case(rank: Runtime) -> None:
    """Each value names its token, so a misrouted row shows."""
    mesh = mesh_of(rank, rank.world_size)
    own = mesh.local_experts(EXPERTS)
    dispatcher = CollectiveDispatcher(EXPERTS, mesh.ep)
    tokens, top_k = 9, 3
    tag = torch.arange(tokens)[:, None] * 1.0 + 100 * rank.rank
    idx, weights = routing("skewed", rank.rank, tokens, top_k)
    for dtype in (torch.float32, torch.bfloat16):
        x = tag.expand(tokens, 7).to(dtype)
        rows = dispatcher.finish(dispatcher.start(x, idx, weights))
        expected = []
        for source in range(rank.world_size):
            source_idx, source_weights = routing("skewed", source, tokens, top_k)
            for token in range(tokens):
                routes = [k for k in range(top_k) if int(source_idx[token, k]) in own]
                if routes:
                    local = [int(source_idx[token, k]) - own.start for k in routes]
                    carried = [source_weights[token, k].item() for k in routes]
                    expected.append((100.0 * source + token, local, carried))
        assert rows.x_RD.dtype == dtype
        assert rows.weights_Rm.dtype == torch.float32
        assert len(rows.x_RD) == len(expected)
        for row, (value, local, carried) in enumerate(expected):
            rounded = torch.tensor(value).to(dtype)
            assert torch.equal(rows.x_RD[row], rounded.expand(7))
            filled = len(local)
            assert rows.local_expert_Rm[row, :filled].tolist() == local
            assert rows.weights_Rm[row, :filled].tolist() == carried
            assert (rows.local_expert_Rm[row, filled:] == -1).all()
            assert (rows.weights_Rm[row, filled:] == 0).all()
        back = dispatcher.combine(rows.x_RD.clone(), rows.handle)
        visits = ((idx[:, :, None] // 4) == torch.arange(2)).any(dim=1).sum(dim=1, keepdim=True)
        assert torch.equal(back, (visits * x.float()).to(dtype))


def test_rows_and_metadata_arrive_bitwise_where_they_belong(ranks):
    ranks(2).run(rows_case)


def test_rows_of_a_token_are_added_in_fp32():
    """256 + 1 + 1 + 1 from four ranks: added in bf16, each 1 would be lost."""
    plan = make_plan(torch.tensor([[0, 1, 2, 3]]), num_ranks=4, num_local_experts=1)
    handle = DispatchHandle(plan=plan, send_counts=[1] * 4, recv_counts=[1] * 4)
    rows = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert sum_rows(rows, handle).item() == 260.0  # 259 rounded to bf16


def test_only_one_exchange_may_be_outstanding():
    dispatcher = LocalDispatcher(4)
    idx, weights = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
    dispatcher.start(torch.ones(1, 3), idx, weights)
    with pytest.raises(AssertionError, match="already outstanding"):
        dispatcher.start(torch.ones(1, 3), idx, weights)
