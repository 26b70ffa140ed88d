"""Rowwise dispatch by kernels: three processes in Triton's interpreter, over shared memory, where
the same text runs as on GPUs.
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

from olmo_shard.dispatch.capacity import most_rows
from olmo_shard.dispatch.device_mailbox import DeviceMailbox
from olmo_shard.dispatch.local import LocalDispatcher
from olmo_shard.dispatch.mailbox import MailboxLayout
from olmo_shard.dispatch.rowwise_device import DeviceRowwiseDispatcher
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import ConfigurationError, LostPeerError
from olmo_shard.kernels import put_packed
from olmo_shard.kernels.grouped_mlp import MainGrads
from tests.dispatch.test_dispatchers import WIDTH, Case, shaped
from tests.support.close import close
from tests.support.device_heap import SharedDeviceHeap
from tests.support.memory import poisoned
from tests.support.ranks import mesh_of

RANKS = 3


@contextmanager
def device_dispatcher(
    rank: Runtime, case: Case, far: tuple[int, ...] = (), seconds: float = 60
) -> Iterator[DeviceRowwiseDispatcher]:
    """Closed at the end; arenas are full of 0xFF wherever nothing was written."""
    most = max(case.tokens)
    layout = MailboxLayout(
        num_ranks=RANKS,
        max_rows=most_rows(most, case.top_k, case.experts, RANKS, case.capacity_factor),
        num_slots=min(case.top_k, case.experts // RANKS),
        width=WIDTH,
        dtype=torch.float32,
    )
    heap = SharedDeviceHeap(mesh_of(rank, RANKS).ep, layout, far)
    mailbox = DeviceMailbox(heap, layout, timedelta(seconds=seconds))
    there = DeviceRowwiseDispatcher(case.experts, mailbox, most, case.capacity_factor)
    try:
        yield there
    finally:
        there.close()


class Layer:
    """Experts of a rank, run the way that a transport prefers, or by the generic one."""

    def __init__(self, weights: list[Tensor], main: bool = False) -> None:
        self.weights = weights
        self.mains = MainGrads(*map(torch.zeros_like, weights)) if main else None

    def experts(self, rows: Any) -> Tensor:
        return rows.through(*self.weights, self.mains, "triton")

    def __call__(self, there: Any, x: Tensor, idx: Tensor, weights: Tensor, fused: bool) -> Tensor:
        kept = there.admit(idx, weights, torch.ones(len(x), dtype=torch.bool))
        flight = there.start(x, kept, weights)
        if fused:
            return there.run(flight, self.experts)
        rows = there.finish(flight)
        return there.combine(self.experts(rows), rows.handle)


def equality_case(rank: Runtime, case: Case, far: tuple[int, ...], main: bool) -> None:
    own = mesh_of(rank, RANKS).local_experts(case.experts)
    weights = [w[own.start : own.stop].clone().requires_grad_() for w in case.expert_weights()]
    whole = [w.requires_grad_() for w in case.expert_weights()]
    mine = Layer(weights, main)
    with device_dispatcher(rank, case, far) as there, poisoned(), played_puts(there):
        for fused in (True, False):
            x, dout, idx, topk_weights = (each.clone() for each in case.inputs(rank.rank))
            x.requires_grad_()
            topk_weights.requires_grad_()
            out = mine(there, x, idx, topk_weights, fused)
            out.backward(shaped(dout, case.layout))
            for other in range(RANKS):
                compare(case, other, rank.rank, whole, (out, x, topk_weights))
        del out
    found = list(mine.mains) if mine.mains else [w.grad for w in weights]
    compare_experts(case, own, found, [w.grad for w in whole], times=2)


def compare_experts(case: Case, own: range, found: Any, expected: Any, times: int) -> None:
    """Gradients of this rank's experts, added up over so many backward passes."""
    here = slice(own.start, own.stop)
    for mine, reference, scale in zip(found, expected, case.expert_scales("plain"), strict=True):
        close(mine, reference[here], scale=times * scale[here])


def compare(
    case: Case,
    other: int,
    me: int,
    whole: list[Tensor],
    found: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    """One rank's tokens through all experts on one rank; the experts' gradients add up."""
    x, dout, idx, topk_weights = (each.clone() for each in case.inputs(other))
    x.requires_grad_()
    topk_weights.requires_grad_()
    local = LocalDispatcher(case.experts, case.capacity_factor)
    kept = local.admit(idx, topk_weights, torch.ones(len(x), dtype=torch.bool))
    flight = local.start(x, kept, topk_weights)
    out = local.run(flight, lambda rows: rows.through(*whole, None, "reference"))
    out.backward(shaped(dout, case.layout).contiguous())
    if other == me and found is not None:
        scale = case.scale(me, "plain")
        close(found[0], out, scale=scale.y_TD)
        close(found[1].grad, x.grad, scale=scale.x_TD)
        close(found[2].grad, topk_weights.grad, scale=scale.weights_TK)


@contextmanager
def played_puts(there: DeviceRowwiseDispatcher) -> Iterator[None]:
    """NVSHMEM's put, which the interpreter does not have."""
    heap = there.mailbox.heap
    assert isinstance(heap, SharedDeviceHeap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(put_packed, "_put_with_signal", heap.put_with_signal)
        yield


CASES = {
    "uniform": Case(transport="device", tokens=(9, 1, 5), top_k=2, experts=6),
    "one hot": Case(transport="device", kind="one_hot", tokens=(3, 4, 1), top_k=2, experts=6),
    "empty ranks": Case(
        transport="device", kind="last_rank_only", tokens=(3, 0, 2), top_k=1, experts=6
    ),
    # More routes than experts on a rank; rows and gradients that are not contiguous.
    "top 5": Case(transport="device", tokens=(2, 0, 4), top_k=5, experts=6, layout="sliced"),
    # Tensors have their largest size then, and the host reads nothing.
    "capacity": Case(transport="device", tokens=(7, 4, 5), top_k=2, experts=6, capacity_factor=0.5),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_local(interpreted, case):
    """Pairs summed on their way, then rows handed out, in one mailbox."""
    interpreted(RANKS).run(equality_case, CASES[case], (), case != "one hot")


def test_rows_for_other_nodes_are_packed_and_put(interpreted):
    case = Case(transport="device", kind="skewed", tokens=(4, 2, 3), top_k=2, experts=6)
    interpreted(RANKS).run(equality_case, case, (1,), True)


def late_case(rank: Runtime, factor: float | None) -> tuple[str, bool]:
    """Rank 2 stays away: the others get an error that names it, or NaN and then the error."""
    case = Case(transport="device", tokens=(4, 4, 4), top_k=2, experts=6, capacity_factor=factor)
    with device_dispatcher(rank, case, seconds=0.5) as there:
        if rank.rank == 2:
            return "", True
        x, _, idx, topk_weights = case.inputs(rank.rank)
        own = mesh_of(rank, RANKS).local_experts(case.experts)
        weights = [w[own.start : own.stop] for w in case.expert_weights()]
        layer = Layer(weights)
        there.mailbox.heap.arena.zero_()  # what was never sent reads as numbers
        if factor is None:  # the host waits for sizes, and learns of it
            with pytest.raises(LostPeerError) as missed:
                layer(there, x, idx, topk_weights, fused=True)
            return str(missed.value), True
        out = layer(there, x, idx, topk_weights, fused=True)
        with pytest.raises(LostPeerError) as missed:
            there.check()
        return str(missed.value), bool(out.isnan().all())


@pytest.mark.parametrize("factor", [None, 1.0])
def test_a_peer_that_stays_away_is_named_and_no_step_is_made_without_it(interpreted, factor):
    for message, nan in interpreted(RANKS).run(late_case, factor)[:2]:
        assert "timed out waiting 0.5 s for rank(s) 2 of the group" in message
        assert "raise run.timeout_seconds" in message
        assert nan


def test_a_micro_batch_that_does_not_fit_is_refused(interpreted):
    interpreted(RANKS).run(overflow_case)


def overflow_case(rank: Runtime) -> None:
    case = Case(transport="device", tokens=(4, 4, 4), top_k=2, experts=6)
    with device_dispatcher(rank, case) as there:
        x = torch.zeros(5, WIDTH)
        with pytest.raises(
            ConfigurationError, match="of 5 tokens does not fit a mailbox made for 4"
        ):
            there.start(x, torch.zeros(5, 2, dtype=torch.long), torch.zeros(5, 2))
        with pytest.raises(AssertionError, match="not the mailbox's rows"):
            there.start(x[:4, 1:], torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2))


def outstanding_case(rank: Runtime) -> None:
    case = Case(transport="device", tokens=(4, 4, 4), top_k=2, experts=6)
    with device_dispatcher(rank, case) as there:
        x, _, idx, topk_weights = case.inputs(rank.rank)
        flight = there.start(x, idx, topk_weights)
        with pytest.raises(AssertionError, match="already outstanding"):
            there.start(x, idx, topk_weights)
        rows = there.finish(flight)
        there.combine(rows.x_RD, rows.handle)


def test_only_one_exchange_may_be_outstanding(interpreted):
    interpreted(RANKS).run(outstanding_case)


def only_experts_case(rank: Runtime) -> None:
    """Tokens and router weights are frozen, as below a frozen trunk."""
    case = CASES["one hot"]
    own = mesh_of(rank, RANKS).local_experts(case.experts)
    whole = [w.requires_grad_() for w in case.expert_weights()]
    weights = [w[own.start : own.stop].clone().requires_grad_() for w in case.expert_weights()]
    with device_dispatcher(rank, case) as there:
        for _ in range(2):
            x, dout, idx, topk_weights = case.inputs(rank.rank)
            out = Layer(weights)(there, x, idx, topk_weights, fused=True)
            out.backward(dout)
            del out
    for other in range(RANKS):
        compare(case, other, -1, whole, None)
    found = [w.grad / 2 for w in weights if w.grad is not None]
    compare_experts(case, own, found, [w.grad for w in whole], times=1)


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Where the package reads a tensor's value on the host, which on a GPU waits for it."""
    found: list[str] = []

    def watched(name: str) -> Any:
        original = getattr(Tensor, name)

        def read(self: Tensor, *arguments: Any) -> Any:
            caller = sys._getframe(1).f_code
            if "/olmo_shard/" in caller.co_filename:
                found.append(f"{caller.co_name}: {name}")
            return original(self, *arguments)

        return read

    reads = "tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__"
    with pytest.MonkeyPatch.context() as patch:
        for name in reads:
            patch.setattr(Tensor, name, watched(name))
        yield found


def reads_case(rank: Runtime, case: Case) -> tuple[list[str], list[str]]:
    """In a forward, and in its backward."""
    own = mesh_of(rank, RANKS).local_experts(case.experts)
    weights = [w[own.start : own.stop].clone().requires_grad_() for w in case.expert_weights()]
    with device_dispatcher(rank, case) as there:
        x, dout, idx, topk_weights = (each.clone() for each in case.inputs(rank.rank))
        x.requires_grad_()
        layer = Layer(weights, main=True)
        with host_reads() as forward:
            out = layer(there, x, idx, topk_weights, fused=True)
        with host_reads() as backward:
            out.backward(dout)
        del out
    return forward, backward


@pytest.mark.parametrize(
    ("case", "reads"),
    [("uniform", ["_sizes: tolist"]), ("capacity", [])],
    ids=["dropless", "capacity"],
)
def test_the_host_reads_sizes_once_in_a_forward_or_nothing(interpreted, case, reads):
    for forward, backward in interpreted(RANKS).run(reads_case, CASES[case]):
        assert forward == reads
        assert backward == []


def test_experts_alone_can_be_trained(interpreted):
    interpreted(RANKS).run(only_experts_case)
