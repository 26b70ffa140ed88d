"""Each transport equals ``local``: rows bitwise, outputs and all gradients to FP32 rounding.

Runs on gloo, in CI. Every rank has its own tokens; the reference runs all experts on one rank.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.local import LocalDispatcher
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.kernels.expert_layout import expert_layout
from olmo_shard.kernels.grouped_mlp import grouped_mlp
from tests.support.dispatch import TRANSPORTS, dispatcher
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


def layer(there: TokenDispatcher, x: Tensor, idx: Tensor, weights: Tensor, experts: Any) -> Tensor:
    kept = there.admit(idx, weights, torch.ones(len(x), dtype=torch.bool))
    rows = there.finish(there.start(x, kept, weights))
    w_gate_up, w_down = experts
    layout = expert_layout(rows.local_expert_Rm, w_gate_up.shape[0])
    weight_P = rows.weights_Rm.flatten()[layout.slot_P]
    y_RD = grouped_mlp(rows.x_RD, weight_P, w_gate_up, w_down, layout)
    return there.combine(y_RD, rows.handle)


def equality_case(
    rank: Runtime,
    transport: str,
    kind: str,
    tokens: list[int],
    top_k: int,
    how: str,
    capacity_factor: float | None = None,
) -> None:
    mesh = mesh_of(rank, rank.world_size)
    own = mesh.local_experts(EXPERTS)
    everyone = []
    for other in range(rank.world_size):
        generator = torch.Generator().manual_seed(1000 + other)
        x = torch.randn(tokens[other], WIDTH, generator=generator)
        dout = torch.randn(tokens[other], WIDTH, generator=generator)
        everyone.append((x, dout, *routing(kind, other, tokens[other], top_k)))
    x, dout, idx, weights = everyone[rank.rank]
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    experts = [w.detach()[own.start : own.stop].clone().requires_grad_() for w in expert_weights()]
    with dispatcher(
        transport,
        mesh.ep,
        experts=EXPERTS,
        top_k=top_k,
        width=WIDTH,
        max_tokens=max(tokens),
        capacity_factor=capacity_factor,
    ) as there:
        out = layer(there, x, idx, weights, experts)
        out.backward(shaped(dout, how))
        compare_with_local(rank, everyone, how, capacity_factor, (out, x, weights, experts), own)
        del out


def compare_with_local(
    rank: Runtime,
    everyone: list[Any],
    how: str,
    capacity_factor: float | None,
    found: tuple[Tensor, Tensor, Tensor, list[Tensor]],
    own: range,
) -> None:
    out, x, weights, experts = found
    whole = expert_weights()
    for other, (x_ref, dout_ref, idx_ref, weights_ref) in enumerate(everyone):
        x_ref, weights_ref = x_ref.clone().requires_grad_(), weights_ref.clone().requires_grad_()
        local = LocalDispatcher(EXPERTS, capacity_factor)
        out_ref = layer(local, x_ref, idx_ref, weights_ref, whole)
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


KINDS = ["uniform", "skewed", "one_hot", "last_rank_only"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_every_transport_equals_local(ranks, transport, kind, top_k):
    """K of 8 is every expert; four ranks have two experts each; one has no token at all."""
    ranks(4).run(equality_case, transport, kind, [20, 1, 0, 33], top_k, "plain")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("capacity_factor", [0.1, 0.6, 1.25])
def test_every_transport_drops_the_same_routes(ranks, transport, capacity_factor):
    case = (transport, "skewed", [20, 1, 0, 33], 3, "plain", capacity_factor)
    ranks(4).run(equality_case, *case)
    ranks(2).run(equality_case, transport, "uniform", [20, 7], 3, "plain", capacity_factor)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_expert_a_rank(ranks, transport):
    ranks(4).run(one_expert_case, transport)


def one_expert_case(rank: Runtime, transport: str) -> None:
    """e = 1, K = E: a token goes everywhere, each row has one slot."""
    mesh = mesh_of(rank, rank.world_size)
    experts = rank.world_size
    idx = torch.stack([torch.randperm(experts) for _ in range(6)])
    x = torch.randn(6, WIDTH)
    with dispatcher(
        transport, mesh.ep, experts=experts, top_k=experts, width=WIDTH, max_tokens=6
    ) as there:
        rows = there.finish(there.start(x, idx, torch.ones(idx.shape)))
        assert rows.local_expert_Rm.tolist() == [[0]] * (6 * experts)
        out = there.combine(rows.x_RD, rows.handle)
        del rows
    torch.testing.assert_close(out, experts * x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_tokens_at_all(ranks, transport):
    ranks(2).run(equality_case, transport, "uniform", [0, 0], 2, "plain")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["stride-0", "transposed", "sliced"])
def test_gradients_that_are_not_contiguous(ranks, transport, how):
    ranks(4).run(equality_case, transport, "uniform", [7, 7, 7, 7], 2, how)


def rows_case(rank: Runtime, transport: str) -> None:
    """Each value names its token, so a misrouted row shows."""
    tokens, top_k = 9, 3
    mesh = mesh_of(rank, rank.world_size)
    own = mesh.local_experts(EXPERTS)
    tag = torch.arange(tokens)[:, None] * 1.0 + 100 * rank.rank
    idx, weights = routing("skewed", rank.rank, tokens, top_k)
    for dtype in (torch.float32, torch.bfloat16):
        x = tag.expand(tokens, 7).to(dtype)
        shape = {"experts": EXPERTS, "top_k": top_k, "width": 7, "max_tokens": tokens}
        with dispatcher(transport, mesh.ep, dtype=dtype, **shape) as there:
            rows = there.finish(there.start(x, idx, weights))
            expected = expected_rows(rank.world_size, own, tokens, top_k)
            assert rows.weights_Rm.dtype == torch.float32
            assert torch.equal(
                rows.x_RD,
                torch.tensor([v for v, _, _ in expected]).to(dtype)[:, None].expand(-1, 7),
            )
            assert rows.local_expert_Rm.tolist() == [local for _, local, _ in expected]
            assert rows.weights_Rm.tolist() == [carried for _, _, carried in expected]
            back = there.combine(rows.x_RD.clone(), rows.handle)
            del rows
        visits = ((idx[:, :, None] // 4) == torch.arange(2)).any(dim=1).sum(dim=1, keepdim=True)
        assert torch.equal(back, (visits * x.float()).to(dtype))


def expected_rows(world_size: int, own: range, tokens: int, top_k: int) -> list[Any]:
    """Of each row for the experts ``own``: its value, local experts and weights by slot."""
    found = []
    for source in range(world_size):
        idx, weights = routing("skewed", source, tokens, top_k)
        for token in range(tokens):
            here = [int(expert) in own for expert in idx[token]]
            if any(here):
                local = [
                    int(e) - own.start if h else -1 for e, h in zip(idx[token], here, strict=True)
                ]
                carried = [
                    w if h else 0.0 for w, h in zip(weights[token].tolist(), here, strict=True)
                ]
                found.append((100.0 * source + token, local, carried))
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_and_metadata_arrive_bitwise_where_they_belong(ranks, transport):
    ranks(2).run(rows_case, transport)


def test_only_one_exchange_may_be_outstanding():
    there = LocalDispatcher(4)
    idx, weights = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
    there.start(torch.ones(1, 3), idx, weights)
    with pytest.raises(AssertionError, match="already outstanding"):
        there.start(torch.ones(1, 3), idx, weights)
