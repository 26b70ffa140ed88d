"""Rowwise dispatch by kernels: three processes in Triton's interpreter, over shared memory.

The text of the kernels is the one that runs on GPUs.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux alone")

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.mailbox.mailbox_gpu import GpuMailbox
from olmo_shard.dispatch.mailbox.mailbox_layout import mailbox_layout
from olmo_shard.dispatch.pending_combine import start_combine
from olmo_shard.dispatch.rowwise.rowwise_gpu import RowwiseGpuTransport, most_pairs
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import ConfigurationError, LostPeerError
from olmo_shard.kernels import put_packed
from olmo_shard.kernels.expert_layout import expert_layout
from olmo_shard.kernels.grouped_mlp import MainGrads, grouped_mlp
from tests.dispatch.test_dispatcher import WIDTH, Case, shaped
from tests.support.close import close
from tests.support.device_heap import SharedGpuHeap
from tests.support.dispatch import local_dispatcher
from tests.support.memory import poisoned
from tests.support.ranks import StartRanks, mesh_of

RANKS = 3


@contextmanager
def open_gpu_dispatcher(
    rank: Runtime, case: Case, remote: tuple[int, ...] = (), seconds: float = 60
) -> Iterator[tuple[TokenDispatcher, GpuMailbox]]:
    """A dispatcher that is closed at the end, and its mailbox.

    Arenas are full of 0xFF wherever nothing was written.
    """
    tokens, factor = max(case.tokens), case.capacity_factor
    layout = mailbox_layout(
        num_experts=case.experts,
        top_k=case.top_k,
        width=WIDTH,
        dtype=torch.float32,
        num_ranks=RANKS,
        max_tokens=tokens,
        capacity_factor=factor,
    )
    heap = SharedGpuHeap(mesh_of(rank, RANKS).ep, layout, remote)
    mailbox = GpuMailbox(heap, layout, timedelta(seconds=seconds))
    max_pairs = most_pairs(layout, tokens, case.top_k, case.experts, factor)
    transport = RowwiseGpuTransport(mailbox, tokens, max_pairs)
    dispatcher = TokenDispatcher(transport, case.experts, factor, "triton")
    try:
        yield dispatcher, mailbox
    finally:
        dispatcher.close()


class Layer:
    """Experts of a rank, fused with the exchanges or between them."""

    def __init__(self, weights: list[Tensor], main: bool = False) -> None:
        self.w_gate_up, self.w_down = weights
        self.main_grads = MainGrads(*map(torch.zeros_like, weights)) if main else None

    def __call__(
        self, dispatcher: TokenDispatcher, x: Tensor, idx: Tensor, weights: Tensor, fused: bool
    ) -> Tensor:
        kept = dispatcher.apply_capacity(idx, weights, torch.ones(len(x), dtype=torch.bool))
        pending = dispatcher.dispatch(x, kept, weights)
        w_gate_up, w_down, main_grads = self.w_gate_up, self.w_down, self.main_grads
        if fused:
            return pending.run_experts(w_gate_up, w_down, main_grads, "triton").wait()
        rows = pending.receive()
        assert rows.weights_Rm is not None
        assert rows.local_expert_Rm is not None
        layout = expert_layout(rows.local_expert_Rm, len(w_down), rows.max_pairs, "triton")
        received = rows.x_RD, rows.weights_Rm
        y_RD = grouped_mlp(*received, w_gate_up, w_down, layout, "triton", main_grads)
        return start_combine(y_RD, pending.transport, rows.handle).wait()


def equality_case(rank: Runtime, case: Case, remote: tuple[int, ...], main: bool) -> None:
    own = mesh_of(rank, RANKS).local_experts(case.experts)
    weights = [w[own.start : own.stop].clone().requires_grad_() for w in case.expert_weights()]
    whole = [w.requires_grad_() for w in case.expert_weights()]
    layer = Layer(weights, main)
    dispatchers = open_gpu_dispatcher(rank, case, remote)
    with dispatchers as (dispatcher, mailbox), poisoned(), played_puts(mailbox):
        for fused in (True, False):
            x, dout, idx, topk_weights = (tensor.clone() for tensor in case.inputs(rank.rank))
            x.requires_grad_()
            topk_weights.requires_grad_()
            out = layer(dispatcher, x, idx, topk_weights, fused)
            out.backward(shaped(dout, case.layout))
            for other in range(RANKS):
                compare(case, other, rank.rank, whole, (out, x, topk_weights))
        del out
    grads = list(layer.main_grads) if layer.main_grads else [w.grad for w in weights]
    compare_experts(case, own, grads, [w.grad for w in whole], times=2)


def compare_experts(case: Case, own: range, grads: Any, expected: Any, times: int) -> None:
    """Compare gradients of this rank's experts, which are sums over ``times`` backward passes."""
    part = slice(own.start, own.stop)
    for grad, reference, scale in zip(grads, expected, case.expert_scales("plain"), strict=True):
        close(grad, reference[part], scale=times * scale[part])


def compare(
    case: Case,
    other: int,
    me: int,
    whole: list[Tensor],
    results: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    """Run one rank's tokens through all experts on one rank; the experts' gradients add up."""
    x, dout, idx, topk_weights = (tensor.clone() for tensor in case.inputs(other))
    x.requires_grad_()
    topk_weights.requires_grad_()
    local = local_dispatcher(case.experts, case.capacity_factor)
    kept = local.apply_capacity(idx, topk_weights, torch.ones(len(x), dtype=torch.bool))
    pending = local.dispatch(x, kept, topk_weights)
    out = pending.run_experts(whole[0], whole[1], None, "reference").wait()
    out.backward(shaped(dout, case.layout).contiguous())
    if other == me and results is not None:
        scale = case.scale(me, "plain")
        close(results[0], out, scale=scale.y_TD)
        close(results[1].grad, x.grad, scale=scale.x_TD)
        close(results[2].grad, topk_weights.grad, scale=scale.weights_TK)


@contextmanager
def played_puts(mailbox: GpuMailbox) -> Iterator[None]:
    """A stand-in for NVSHMEM's put, which the interpreter does not have."""
    heap = mailbox.heap
    assert isinstance(heap, SharedGpuHeap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(put_packed, "_put_with_signal", heap.put_with_signal)
        yield


CASES = {
    "uniform": Case(transport="rowwise", tokens=(9, 1, 5), top_k=2, experts=6),
    "one hot": Case(transport="rowwise", kind="one_hot", tokens=(3, 4, 1), top_k=2, experts=6),
    "empty ranks": Case(
        transport="rowwise", kind="last_rank_only", tokens=(3, 0, 2), top_k=1, experts=6
    ),
    # More routes than experts on a rank; rows and gradients that are not contiguous.
    "top 5": Case(transport="rowwise", tokens=(2, 0, 4), top_k=5, experts=6, layout="sliced"),
    # Tensors have their largest size then, and the host reads nothing.
    "capacity": Case(
        transport="rowwise", tokens=(7, 4, 5), top_k=2, experts=6, capacity_factor=0.5
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_local(interpreted: StartRanks, case: str) -> None:
    """Experts fused with the exchanges, then experts between them, in one mailbox."""
    interpreted(RANKS).run(equality_case, CASES[case], (), case != "one hot")


def test_rows_for_other_nodes_are_packed_and_put(interpreted: StartRanks) -> None:
    case = Case(transport="rowwise", kind="skewed", tokens=(4, 2, 3), top_k=2, experts=6)
    interpreted(RANKS).run(equality_case, case, (1,), True)


def late_case(rank: Runtime, factor: float | None) -> tuple[str, bool]:
    """Rank 2 sends nothing: the others get an error that names it, or NaN and then the error."""
    case = Case(transport="rowwise", tokens=(4, 4, 4), top_k=2, experts=6, capacity_factor=factor)
    with open_gpu_dispatcher(rank, case, seconds=0.5) as (dispatcher, mailbox):
        if rank.rank == 2:
            return "", True
        x, _, idx, topk_weights = case.inputs(rank.rank)
        own = mesh_of(rank, RANKS).local_experts(case.experts)
        weights = [w[own.start : own.stop] for w in case.expert_weights()]
        layer = Layer(weights)
        mailbox.heap.arena.zero_()  # rows that were never sent read as numbers
        if factor is None:  # the host waits for sizes, and sees the error
            with pytest.raises(LostPeerError) as missed:
                layer(dispatcher, x, idx, topk_weights, fused=True)
            return str(missed.value), True
        out = layer(dispatcher, x, idx, topk_weights, fused=True)
        with pytest.raises(LostPeerError) as missed:
            dispatcher.check()
        return str(missed.value), bool(out.isnan().all())


@pytest.mark.parametrize("factor", [None, 1.0])
def test_a_peer_that_stays_away_is_named_and_no_step_is_made_without_it(
    interpreted: StartRanks, factor: float | None
) -> None:
    for message, nan in interpreted(RANKS).run(late_case, factor)[:2]:
        assert "timed out waiting 0.5 s for rank(s) 2 of the group" in message
        assert "raise run.timeout_seconds" in message
        assert nan


def test_a_micro_batch_that_does_not_fit_is_refused(interpreted: StartRanks) -> None:
    interpreted(RANKS).run(overflow_case)


def overflow_case(rank: Runtime) -> None:
    case = Case(transport="rowwise", tokens=(4, 4, 4), top_k=2, experts=6)
    with open_gpu_dispatcher(rank, case) as (dispatcher, _):
        x = torch.zeros(5, WIDTH)
        with pytest.raises(
            ConfigurationError, match="of 5 tokens does not fit a mailbox made for 4"
        ):
            dispatcher.dispatch(x, torch.zeros(5, 2, dtype=torch.long), torch.zeros(5, 2))
        with pytest.raises(AssertionError, match="not the mailbox's rows"):
            dispatcher.dispatch(x[:4, 1:], torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2))


def outstanding_case(rank: Runtime) -> None:
    case = Case(transport="rowwise", tokens=(4, 4, 4), top_k=2, experts=6)
    with open_gpu_dispatcher(rank, case) as (dispatcher, _):
        x, _, idx, topk_weights = case.inputs(rank.rank)
        pending = dispatcher.dispatch(x, idx, topk_weights)
        with pytest.raises(AssertionError, match="already outstanding"):
            dispatcher.dispatch(x, idx, topk_weights)
        rows = pending.receive()
        start_combine(rows.x_RD, pending.transport, rows.handle).wait()


def test_only_one_exchange_may_be_outstanding(interpreted: StartRanks) -> None:
    interpreted(RANKS).run(outstanding_case)


def only_experts_case(rank: Runtime) -> None:
    """Tokens and router weights need no gradient, as above a frozen trunk."""
    case = CASES["one hot"]
    own = mesh_of(rank, RANKS).local_experts(case.experts)
    whole = [w.requires_grad_() for w in case.expert_weights()]
    weights = [w[own.start : own.stop].clone().requires_grad_() for w in case.expert_weights()]
    with open_gpu_dispatcher(rank, case) as (dispatcher, _):
        for _ in range(2):
            x, dout, idx, topk_weights = case.inputs(rank.rank)
            out = Layer(weights)(dispatcher, x, idx, topk_weights, fused=True)
            out.backward(dout)
            del out
    for other in range(RANKS):
        compare(case, other, -1, whole, None)
    grads = [w.grad / 2 for w in weights if w.grad is not None]
    compare_experts(case, own, grads, [w.grad for w in whole], times=1)


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """The places where the package reads a tensor's value on the host, which waits for a GPU."""
    calls: list[str] = []

    def watched(name: str) -> Any:
        original = getattr(Tensor, name)

        def read(self: Tensor, *arguments: Any) -> Any:
            caller = sys._getframe(1).f_code
            if "/olmo_shard/" in caller.co_filename:
                calls.append(f"{caller.co_name}: {name}")
            return original(self, *arguments)

        return read

    reads = "tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__"
    with pytest.MonkeyPatch.context() as patch:
        for name in reads:
            patch.setattr(Tensor, name, watched(name))
        yield calls


def reads_case(rank: Runtime, case: Case) -> tuple[list[str], list[str]]:
    """Reads on the host in a forward, and in its backward."""
    own = mesh_of(rank, RANKS).local_experts(case.experts)
    weights = [w[own.start : own.stop].clone().requires_grad_() for w in case.expert_weights()]
    with open_gpu_dispatcher(rank, case) as (dispatcher, _):
        x, dout, idx, topk_weights = (tensor.clone() for tensor in case.inputs(rank.rank))
        x.requires_grad_()
        layer = Layer(weights, main=True)
        with host_reads() as forward:
            out = layer(dispatcher, x, idx, topk_weights, fused=True)
        with host_reads() as backward:
            out.backward(dout)
        del out
    return forward, backward


@pytest.mark.parametrize(
    ("case", "reads"),
    [("uniform", ["_sizes: tolist"]), ("capacity", [])],
    ids=["dropless", "capacity"],
)
def test_the_host_reads_sizes_once_in_a_forward_or_nothing(
    interpreted: StartRanks, case: str, reads: list[str]
) -> None:
    for forward, backward in interpreted(RANKS).run(reads_case, CASES[case]):
        assert forward == reads
        assert backward == []


def test_experts_alone_can_be_trained(interpreted: StartRanks) -> None:
    interpreted(RANKS).run(only_experts_case)
