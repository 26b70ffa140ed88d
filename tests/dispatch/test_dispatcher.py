"""Each transport equals ``local``: rows bitwise, outputs and all gradients to FP32 rounding.

Every rank has its own tokens; the reference runs all experts on one rank.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.pending_combine import start_combine
from olmo_shard.dispatch.pending_dispatch import PendingDispatch
from olmo_shard.dispatch.transport import ReceivedRows
from olmo_shard.distributed.runtime import Runtime
from tests.support.close import close
from tests.support.dispatch import TRANSPORTS, local_dispatcher, open_dispatcher
from tests.support.ranks import StartRanks, mesh_of
from tests.support.scales import SwigluScale, swiglu_scale

WIDTH, HIDDEN = 12, 10
KINDS = ["uniform", "skewed", "one_hot", "last_rank_only"]


@dataclass(frozen=True, kw_only=True)
class Case:
    transport: str
    kind: str = "uniform"
    """Kind of routing."""
    tokens: tuple[int, ...]
    """Number of tokens of each rank."""
    top_k: int
    experts: int = 8
    layout: str = "plain"
    """Memory layout of the tokens and of the incoming gradient."""
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
        """Scales of a rank's output and gradients; the scales of the experts are its part."""
        x, dout, idx, weights = self.inputs(rank)
        local = local_dispatcher(self.experts, self.capacity_factor)
        kept = local.apply_capacity(idx, weights, torch.ones(len(x), dtype=torch.bool))
        x_used = shaped(x.requires_grad_(), x_layout).contiguous()
        dout_used = shaped(dout, self.layout)
        w_gate_up, w_down = self.expert_weights()
        scale = swiglu_scale(x_used, kept, weights, w_gate_up, w_down, dout_used)
        (x_scale,) = torch.autograd.grad(x_used, x, scale.x_TD.float())
        return scale._replace(x_TD=x_scale)

    def expert_scales(self, x_layout: str) -> list[Tensor]:
        """Scales of the gradients of all experts' matrices: the parts of all ranks."""
        parts = [self.scale(rank, x_layout)[3:] for rank in range(len(self.tokens))]
        return [torch.stack(scales).sum(dim=0) for scales in zip(*parts, strict=True)]


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


def layer(
    dispatcher: TokenDispatcher, x: Tensor, idx: Tensor, weights: Tensor, experts: list[Tensor]
) -> Tensor:
    """The routed experts of a layer, dispatch and combine included."""
    kept = dispatcher.apply_capacity(idx, weights, torch.ones(len(x), dtype=torch.bool))
    pending = dispatcher.dispatch(x, kept, weights)
    return pending.run_experts(experts[0], experts[1], None, "reference").wait()


def return_as_received(pending: PendingDispatch, rows: ReceivedRows) -> Tensor:
    """The combine of experts that return what they get."""
    return start_combine(rows.x_RD, pending.transport, rows.handle).wait()


def equality_case(rank: Runtime, case: Case) -> None:
    mesh = mesh_of(rank, rank.world_size)
    own = mesh.local_experts(case.experts)
    x, dout, idx, weights = (tensor.clone() for tensor in case.inputs(rank.rank))
    x.requires_grad_()
    weights.requires_grad_()
    experts = [w[own.start : own.stop].clone().requires_grad_() for w in case.expert_weights()]
    with open_dispatcher(
        case.transport,
        mesh.ep,
        experts=case.experts,
        top_k=case.top_k,
        width=WIDTH,
        max_tokens=max(case.tokens),
        capacity_factor=case.capacity_factor,
    ) as dispatcher:
        out = layer(dispatcher, shaped(x, case.layout), idx, weights, experts)
        out.backward(shaped(dout, case.layout))
        compare_with_local(rank, case, (out, x, weights, experts), own)
        del out


def compare_with_local(
    rank: Runtime, case: Case, results: tuple[Tensor, Tensor, Tensor, list[Tensor]], own: range
) -> None:
    """Compare a rank's results and the gradients of its experts ``own`` with one rank's."""
    out, x, weights, experts = results
    whole = [w.requires_grad_() for w in case.expert_weights()]
    for other in range(rank.world_size):
        x_ref, dout, idx, weights_ref = (tensor.clone() for tensor in case.inputs(other))
        x_ref.requires_grad_()
        weights_ref.requires_grad_()
        local = local_dispatcher(case.experts, case.capacity_factor)
        x_used = shaped(x_ref, case.layout).contiguous()
        out_ref = layer(local, x_used, idx, weights_ref, whole)
        out_ref.backward(shaped(dout, case.layout).contiguous())
        if other == rank.rank:
            scale = case.scale(other, case.layout)
            close(out, out_ref, scale=scale.y_TD)
            close(x.grad, x_ref.grad, scale=scale.x_TD)
            close(weights.grad, weights_ref.grad, scale=scale.weights_TK)
    part = slice(own.start, own.stop)
    scales = case.expert_scales(case.layout)
    for own_weights, reference, scale in zip(experts, whole, scales, strict=True):
        assert reference.grad is not None
        close(own_weights.grad, reference.grad[part], scale=scale[part])


def shaped(rows: Tensor, layout: str) -> Tensor:
    """Rows in a memory layout; with a stride of 0 all elements are the first value."""
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
def test_every_transport_equals_local(
    ranks: StartRanks, transport: str, kind: str, top_k: int
) -> None:
    """K of 8 is every expert; four ranks have two experts each; one has no token at all."""
    case = Case(transport=transport, kind=kind, tokens=(20, 1, 0, 33), top_k=top_k)
    ranks(4).run(equality_case, case)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_one_expert_per_rank(ranks: StartRanks, transport: str, kind: str, top_k: int) -> None:
    case = Case(transport=transport, kind=kind, tokens=(9, 1, 0, 12), top_k=top_k, experts=4)
    ranks(4).run(equality_case, case)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("capacity_factor", [0.1, 0.6, 1.25])
@pytest.mark.parametrize(("kind", "tokens"), [("skewed", (20, 1, 0, 33)), ("uniform", (20, 7))])
def test_every_transport_drops_the_same_routes(
    ranks: StartRanks, transport: str, capacity_factor: float, kind: str, tokens: tuple[int, ...]
) -> None:
    case = Case(
        transport=transport, kind=kind, tokens=tokens, top_k=3, capacity_factor=capacity_factor
    )
    ranks(len(tokens)).run(equality_case, case)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_tokens_at_all(ranks: StartRanks, transport: str) -> None:
    ranks(2).run(equality_case, Case(transport=transport, tokens=(0, 0), top_k=2))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", ["stride-0", "transposed", "sliced"])
def test_tokens_and_gradients_that_are_not_contiguous(
    ranks: StartRanks, transport: str, layout: str
) -> None:
    case = Case(transport=transport, tokens=(7, 7, 7, 7), top_k=2, layout=layout)
    ranks(4).run(equality_case, case)


def rows_case(rank: Runtime, transport: str, kind: str, top_k: int) -> None:
    """Each value names its token, so a misrouted row shows."""
    tokens = (9, 4, 0, 6)[: rank.world_size]
    mesh = mesh_of(rank, rank.world_size)
    own = mesh.local_experts(8)
    count = tokens[rank.rank]
    idx, weights = routing(kind, rank.rank, count, top_k)
    expected = expected_rows(kind, tokens, top_k, own)
    for dtype in (torch.float32, torch.bfloat16):
        x = tags(rank.rank, count).to(dtype)
        shape = {"experts": 8, "top_k": top_k, "width": 7, "max_tokens": 9}
        with open_dispatcher(transport, mesh.ep, dtype=dtype, **shape) as dispatcher:
            pending = dispatcher.dispatch(x, idx, weights)
            rows = pending.receive()
            assert rows.weights_Rm is not None
            assert rows.local_expert_Rm is not None
            assert rows.weights_Rm.dtype == torch.float32
            values = torch.tensor([value for value, _, _ in expected]).to(dtype)
            assert torch.equal(rows.x_RD, values[:, None].expand(-1, 7))
            assert rows.local_expert_Rm.tolist() == [local for _, local, _ in expected]
            assert rows.weights_Rm.tolist() == [carried for _, _, carried in expected]
            back = start_combine(rows.x_RD.clone(), pending.transport, rows.handle).wait()
            del rows
        owners = idx[:, :, None] // (8 // rank.world_size) == torch.arange(rank.world_size)
        visits = owners.any(dim=1).sum(dim=1, keepdim=True)
        assert torch.equal(back, (visits * x.float()).to(dtype))


def tags(rank: int, tokens: int) -> Tensor:
    """Rows of 7 elements that name the rank and the token."""
    return (torch.arange(tokens)[:, None] * 1.0 + 100 * rank).expand(tokens, 7)


def expected_rows(kind: str, tokens: tuple[int, ...], top_k: int, own: range) -> list[Any]:
    """For each row that goes to the experts ``own``: its value, local experts and weights."""
    rows = []
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
                rows.append((float(tags(source, count)[token, 0]), local, carried))
    return rows


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "top_k"), [(2, 3), (4, 3), (4, 1), (2, 8)])
def test_rows_and_metadata_arrive_bitwise_where_they_belong(
    ranks: StartRanks, transport: str, kind: str, size: int, top_k: int
) -> None:
    """On 4 ranks with 2 experts each, K = 3 is more than a rank has."""
    ranks(size).run(rows_case, transport, kind, top_k)


def figures_case(rank: Runtime, transport: str) -> tuple[int, int]:
    """Rows that leave this rank, by the dispatcher and counted from the routing."""
    mesh = mesh_of(rank, rank.world_size)
    idx, weights = routing("uniform", rank.rank, 20, 2)
    shape: dict[str, Any] = {"experts": 8, "top_k": 2, "width": 7, "max_tokens": 20}
    with open_dispatcher(transport, mesh.ep, **shape) as dispatcher:
        pending = dispatcher.dispatch(torch.zeros(20, 7), idx, weights)
        return_as_received(pending, pending.receive())
    owners = idx // (8 // rank.world_size)
    others = [r for r in range(rank.world_size) if r != rank.rank]
    return int(pending.rows_to_others), sum(int((owners == r).any(dim=1).sum()) for r in others)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_that_leave_a_rank_are_counted(ranks: StartRanks, transport: str) -> None:
    results = ranks(4).run(figures_case, transport)
    assert all(reported == counted for reported, counted in results), results
    assert len({reported for reported, _ in results}) > 1


def overflow_case(rank: Runtime) -> None:
    """Without ``apply_capacity``, routes do not fit a mailbox that capacity made small."""
    shape: dict[str, Any] = {"experts": 4, "top_k": 1, "width": 7, "max_tokens": 8}
    group = mesh_of(rank, 2).ep
    with open_dispatcher("rowwise", group, capacity_factor=0.5, **shape) as dispatcher:
        idx = torch.full((8, 1), 3 * (1 - rank.rank))
        with pytest.raises(AssertionError, match="more rows than the mailbox has"):
            dispatcher.dispatch(torch.zeros(8, 7), idx, torch.ones(8, 1))
        for wrong in (torch.zeros(8, 7, dtype=torch.bfloat16), torch.zeros(8, 6)):
            with pytest.raises(AssertionError, match="not the mailbox's rows"):
                dispatcher.dispatch(wrong, idx, torch.ones(8, 1))


def test_what_does_not_fit_a_mailbox_is_not_written(ranks: StartRanks) -> None:
    ranks(2).run(overflow_case)


def test_only_one_exchange_may_be_outstanding() -> None:
    dispatcher = local_dispatcher(4)
    idx, weights = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
    dispatcher.dispatch(torch.ones(1, 3), idx, weights)
    with pytest.raises(AssertionError, match="already outstanding"):
        dispatcher.dispatch(torch.ones(1, 3), idx, weights)
