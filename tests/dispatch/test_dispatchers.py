"""Each transport equals ``local``: rows bitwise, outputs and all gradients to FP32 rounding.

Runs on gloo. Every rank has its own tokens; the reference runs all experts on one rank.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.local import LocalDispatcher
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.kernels.expert_layout import expert_layout
from olmo_shard.kernels.grouped_mlp import grouped_mlp
from tests.support.close import close
from tests.support.dispatch import TRANSPORTS, dispatcher
from tests.support.ranks import mesh_of
from tests.support.scales import SwigluScale, swiglu_scale

WIDTH, HIDDEN = 12, 10
KINDS = ["uniform", "skewed", "one_hot", "last_rank_only"]


@dataclass(frozen=True, kw_only=True)
class Case:
    transport: str
    kind: str = "uniform"
    """Of routing."""
    tokens: tuple[int, ...]
    """Of each rank."""
    top_k: int
    experts: int = 8
    layout: str = "plain"
    """In memory, of the tokens and of the incoming gradient."""
    capacity_factor: float | None = None

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, incoming gradient, experts and weights of a rank."""
        generator = torch.Generator().manual_seed(1000 + rank)
        x = torch.randn(self.tokens[rank], WIDTH, generator=generator)
        dout = torch.randn(self.tokens[rank], WIDTH, generator=generator)
        return (x, dout, *routing(self.kind, rank, self.tokens[rank], self.top_k, self.experts))

    def expert_weights(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(99)
        shapes = ((self.experts, 2 * HIDDEN, WIDTH), (self.experts, WIDTH, HIDDEN))
        return [torch.randn(shape, generator=generator) * 0.3 for shape in shapes]

    def scale(self, rank: int, x_layout: str) -> SwigluScale:
        """Scales of a rank's output and gradients; those of the experts are this rank's part."""
        x, dout, idx, weights = self.inputs(rank)
        local = LocalDispatcher(self.experts, self.capacity_factor)
        kept = local.admit(idx, weights, torch.ones(len(x), dtype=torch.bool))
        x_used = shaped(x.requires_grad_(), x_layout).contiguous()
        dout_used = shaped(dout, self.layout)
        w_gate_up, w_down = self.expert_weights()
        found = swiglu_scale(x_used, kept, weights, w_gate_up, w_down, dout_used)
        (x_scale,) = torch.autograd.grad(x_used, x, found.x_TD.float())
        return found._replace(x_TD=x_scale)

    def expert_scales(self, x_layout: str) -> list[Tensor]:
        """Scales of the gradients of all experts' matrices: the parts of all ranks."""
        parts = [self.scale(rank, x_layout)[3:] for rank in range(len(self.tokens))]
        return [torch.stack(each).sum(dim=0) for each in zip(*parts, strict=True)]


def routing(
    kind: str, rank: int, tokens: int, top_k: int, experts: int = 8
) -> tuple[Tensor, Tensor]:
    """Distinct experts of each token, and weights."""
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(tokens, experts, generator=generator)
    if kind == "skewed":
        scores[:, 0] += 1
    elif kind == "one_hot":
        scores += torch.arange(experts, 0, -1) * 10
    elif kind == "last_rank_only":
        scores[:, -top_k:] += 10
    topk_idx = scores.argsort(dim=1, descending=True)[:, :top_k]
    return topk_idx, torch.rand(tokens, top_k, generator=generator) + 0.1


def layer(there: TokenDispatcher, x: Tensor, idx: Tensor, weights: Tensor, experts: Any) -> Tensor:
    kept = there.admit(idx, weights, torch.ones(len(x), dtype=torch.bool))
    rows = there.finish(there.start(x, kept, weights))
    w_gate_up, w_down = experts
    layout = expert_layout(rows.local_expert_Rm, w_gate_up.shape[0])
    y_RD = grouped_mlp(rows.x_RD, rows.weights_Rm, w_gate_up, w_down, layout)
    return there.combine(y_RD, rows.handle)


def equality_case(rank: Runtime, case: Case) -> None:
    mesh = mesh_of(rank, rank.world_size)
    own = mesh.local_experts(case.experts)
    x, dout, idx, weights = (each.clone() for each in case.inputs(rank.rank))
    x.requires_grad_()
    weights.requires_grad_()
    experts = [w[own.start : own.stop].clone().requires_grad_() for w in case.expert_weights()]
    with dispatcher(
        case.transport,
        mesh.ep,
        experts=case.experts,
        top_k=case.top_k,
        width=WIDTH,
        max_tokens=max(case.tokens),
        capacity_factor=case.capacity_factor,
    ) as there:
        out = layer(there, shaped(x, case.layout), idx, weights, experts)
        out.backward(shaped(dout, case.layout))
        compare_with_local(rank, case, (out, x, weights, experts), own)
        del out


def compare_with_local(
    rank: Runtime, case: Case, found: tuple[Tensor, Tensor, Tensor, list[Tensor]], own: range
) -> None:
    out, x, weights, experts = found
    whole = [w.requires_grad_() for w in case.expert_weights()]
    for other in range(rank.world_size):
        x_ref, dout, idx, weights_ref = (each.clone() for each in case.inputs(other))
        x_ref.requires_grad_()
        weights_ref.requires_grad_()
        local = LocalDispatcher(case.experts, case.capacity_factor)
        x_used = shaped(x_ref, case.layout).contiguous()
        out_ref = layer(local, x_used, idx, weights_ref, whole)
        out_ref.backward(shaped(dout, case.layout).contiguous())
        if other == rank.rank:
            scale = case.scale(other, case.layout)
            close(out, out_ref, scale=scale.y_TD)
            close(x.grad, x_ref.grad, scale=scale.x_TD)
            close(weights.grad, weights_ref.grad, scale=scale.weights_TK)
    here = slice(own.start, own.stop)
    scales = case.expert_scales(case.layout)
    for mine, reference, scale in zip(experts, whole, scales, strict=True):
        assert reference.grad is not None
        close(mine.grad, reference.grad[here], scale=scale[here])


def shaped(rows: Tensor, layout: str) -> Tensor:
    """Rows in that memory layout; with a stride of 0 all are the first value."""
    if layout == "stride-0":
        return rows[:1, :1].expand_as(rows)
    if layout == "transposed":
        return rows.T.contiguous().T
    if layout == "sliced":
        return torch.cat([rows, rows], dim=1)[:, ::2]
    return rows


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_every_transport_equals_local(ranks, transport, kind, top_k):
    """K of 8 is every expert; four ranks have two experts each; one has no token at all."""
    case = Case(transport=transport, kind=kind, tokens=(20, 1, 0, 33), top_k=top_k)
    ranks(4).run(equality_case, case)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_one_expert_a_rank(ranks, transport, kind, top_k):
    case = Case(transport=transport, kind=kind, tokens=(9, 1, 0, 12), top_k=top_k, experts=4)
    ranks(4).run(equality_case, case)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("capacity_factor", [0.1, 0.6, 1.25])
@pytest.mark.parametrize(("kind", "tokens"), [("skewed", (20, 1, 0, 33)), ("uniform", (20, 7))])
def test_every_transport_drops_the_same_routes(ranks, transport, capacity_factor, kind, tokens):
    case = Case(
        transport=transport, kind=kind, tokens=tokens, top_k=3, capacity_factor=capacity_factor
    )
    ranks(len(tokens)).run(equality_case, case)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_tokens_at_all(ranks, transport):
    ranks(2).run(equality_case, Case(transport=transport, tokens=(0, 0), top_k=2))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", ["stride-0", "transposed", "sliced"])
def test_tokens_and_gradients_that_are_not_contiguous(ranks, transport, layout):
    case = Case(transport=transport, tokens=(7, 7, 7, 7), top_k=2, layout=layout)
    ranks(4).run(equality_case, case)


def rows_case(rank: Runtime, transport: str, kind: str, top_k: int) -> None:
    """Each value names its token, so a misrouted row shows."""
    tokens = (9, 4, 0, 6)[: rank.world_size]
    mesh = mesh_of(rank, rank.world_size)
    own = mesh.local_experts(8)
    mine = tokens[rank.rank]
    idx, weights = routing(kind, rank.rank, mine, top_k)
    expected = expected_rows(kind, tokens, top_k, own)
    for dtype in (torch.float32, torch.bfloat16):
        x = tags(rank.rank, mine).to(dtype)
        shape = {"experts": 8, "top_k": top_k, "width": 7, "max_tokens": 9}
        with dispatcher(transport, mesh.ep, dtype=dtype, **shape) as there:
            rows = there.finish(there.start(x, idx, weights))
            assert rows.weights_Rm.dtype == torch.float32
            values = torch.tensor([value for value, _, _ in expected]).to(dtype)
            assert torch.equal(rows.x_RD, values[:, None].expand(-1, 7))
            assert rows.local_expert_Rm.tolist() == [local for _, local, _ in expected]
            assert rows.weights_Rm.tolist() == [carried for _, _, carried in expected]
            back = there.combine(rows.x_RD.clone(), rows.handle)
            del rows
        owners = idx[:, :, None] // (8 // rank.world_size) == torch.arange(rank.world_size)
        visits = owners.any(dim=1).sum(dim=1, keepdim=True)
        assert torch.equal(back, (visits * x.float()).to(dtype))


def tags(rank: int, tokens: int) -> Tensor:
    return (torch.arange(tokens)[:, None] * 1.0 + 100 * rank).expand(tokens, 7)


def expected_rows(kind: str, tokens: tuple[int, ...], top_k: int, own: range) -> list[Any]:
    """Of each row for the experts ``own``: its value, local experts and weights by slot."""
    found = []
    by_route = top_k <= len(own)
    for source, count in enumerate(tokens):
        idx, weights = routing(kind, source, count, top_k)
        for token in range(count):
            local, carried = [-1] * min(top_k, len(own)), [0.0] * min(top_k, len(own))
            for k, expert in enumerate(idx[token].tolist()):
                if expert in own:
                    slot = k if by_route else expert - own.start
                    local[slot], carried[slot] = expert - own.start, weights[token, k].item()
            if max(local) >= 0:
                found.append((float(tags(source, count)[token, 0]), local, carried))
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "top_k"), [(2, 3), (4, 3), (4, 1), (2, 8)])
def test_rows_and_metadata_arrive_bitwise_where_they_belong(ranks, transport, kind, size, top_k):
    """On 4 ranks of 2 experts K = 3 is more than a rank has."""
    ranks(size).run(rows_case, transport, kind, top_k)


def figures_case(rank: Runtime, transport: str) -> tuple[int, int]:
    """Rows that leave this rank, by the dispatcher and counted from the routing."""
    mesh = mesh_of(rank, rank.world_size)
    idx, weights = routing("uniform", rank.rank, 20, 2)
    shape: dict[str, Any] = {"experts": 8, "top_k": 2, "width": 7, "max_tokens": 20}
    with dispatcher(transport, mesh.ep, **shape) as there:
        flight = there.start(torch.zeros(20, 7), idx, weights)
        rows = there.finish(flight)
        there.combine(rows.x_RD, rows.handle)
        del rows
    owners = idx // (8 // rank.world_size)
    others = [r for r in range(rank.world_size) if r != rank.rank]
    return int(flight.rows_to_others), sum(int((owners == r).any(dim=1).sum()) for r in others)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_that_leave_a_rank_are_counted(ranks, transport):
    found = ranks(4).run(figures_case, transport)
    assert all(said == counted for said, counted in found), found
    assert len({said for said, _ in found}) > 1


def overflow_case(rank: Runtime) -> None:
    """Routes that nobody admitted do not fit a mailbox that capacity made small."""
    shape: dict[str, Any] = {"experts": 4, "top_k": 1, "width": 7, "max_tokens": 8}
    with dispatcher("rowwise", mesh_of(rank, 2).ep, capacity_factor=0.5, **shape) as there:
        idx = torch.full((8, 1), 3 * (1 - rank.rank))
        with pytest.raises(AssertionError, match="more rows than the mailbox has"):
            there.start(torch.zeros(8, 7), idx, torch.ones(8, 1))
        for wrong in (torch.zeros(8, 7, dtype=torch.bfloat16), torch.zeros(8, 6)):
            with pytest.raises(AssertionError, match="not the mailbox's rows"):
                there.start(wrong, idx, torch.ones(8, 1))


def test_what_does_not_fit_a_mailbox_is_not_written(ranks):
    ranks(2).run(overflow_case)


def test_only_one_exchange_may_be_outstanding():
    there = LocalDispatcher(4)
    idx, weights = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
    there.start(torch.ones(1, 3), idx, weights)
    with pytest.raises(AssertionError, match="already outstanding"):
        there.start(torch.ones(1, 3), idx, weights)
