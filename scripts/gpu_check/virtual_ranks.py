"""Part b of the GPU check: dispatch, experts and combine on 4 and 8 virtual ranks of one device.

The kernels of a phase run for one rank after the other, so the flags of every wait are already set.
The phases::

    forward   all send_rows | all receive_rows, experts | all return_pairs
              | all receive_returned_rows
    backward  all send_rows | all receive_rows, experts' backward, return_pairs
              | all receive_returned_rows

The reference runs all experts on each rank's tokens in FP32, without an exchange.
"""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.local import LocalTransport
from olmo_shard.dispatch.mailbox.mailbox_gpu import GpuMailbox
from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout, mailbox_layout
from olmo_shard.dispatch.row_plan import DispatchPlan, make_plan
from olmo_shard.dispatch.rowwise.rowwise_gpu import RowwiseGpuTransport, most_pairs
from olmo_shard.dispatch.transport import DispatchHandle
from olmo_shard.distributed.comm_stats import comm_stats
from olmo_shard.kernels.expert_layout import expert_layout
from olmo_shard.kernels.grouped_mlp import (
    MainGrads,
    Saved,
    grouped_mlp_bwd,
    grouped_mlp_fwd,
    weight_of_pairs,
    weight_of_slots,
)
from scripts.gpu_check.compare import Pairs, Setup, close, equal, poisoned
from scripts.gpu_check.inputs import Draw, Kind, Weights
from scripts.gpu_check.row import Check, Row
from scripts.gpu_check.virtual_heap import VirtualHeap, virtual_heaps

TIMEOUT = timedelta(seconds=5)


class Case(NamedTuple):
    """Sizes and routing of an exchange."""

    name: str
    kind: Kind
    tokens: tuple[int, ...]
    """Number of tokens per rank."""
    top_k: int
    experts: int
    width: int
    hidden: int
    dtype: torch.dtype
    capacity_factor: float | None = None
    rounds: int = 3
    """Rounds of dispatch, combine and their backward: four epochs each."""

    @property
    def num_ranks(self) -> int:
        """Number of virtual ranks."""
        return len(self.tokens)

    def layout(self) -> MailboxLayout:
        """Layout of the mailboxes."""
        return mailbox_layout(
            num_experts=self.experts,
            top_k=self.top_k,
            width=self.width,
            dtype=self.dtype,
            num_ranks=self.num_ranks,
            max_tokens=max(self.tokens),
            capacity_factor=self.capacity_factor,
        )


BF16, FP32 = torch.bfloat16, torch.float32
FOUR, EIGHT = (701, 0, 1, 350), (1000, 3, 0, 512, 700, 128, 1, 999)
# Few widths and types: every combination compiles all kernels anew.
CASES = [
    Case("4 ranks, skewed, fp32", "skewed", FOUR, 4, 16, 516, 130, FP32),
    Case("4 ranks, capacity 0.5, fp32", "last", FOUR, 4, 16, 516, 130, FP32, 0.5),
    Case("8 ranks", "uniform", EIGHT, 8, 64, 1024, 256, BF16),
    Case("8 ranks, capacity 1.25", "skewed", EIGHT, 8, 64, 1024, 256, BF16, 1.25),
    Case("4 ranks, all to the last, odd width", "last", FOUR, 2, 16, 1021, 99, BF16),
]
TINY = [
    Case("2 ranks, capacity 1, fp32", "skewed", (3, 2), 2, 8, 12, 10, FP32, 1.0, rounds=2),
    Case("4 ranks, skewed", "skewed", (2, 0, 1, 3), 2, 8, 12, 10, FP32, rounds=1),
    Case("8 ranks", "uniform", (1, 0, 1, 1, 1, 0, 1, 1), 2, 16, 8, 6, BF16, rounds=1),
]


class Tokens(NamedTuple):
    """Inputs of one rank in one round: tokens, output gradients, experts and router weights."""

    x: Tensor
    dout: Tensor
    idx: Tensor
    weights: Tensor


def checks(setup: Setup) -> Iterator[Check]:
    """One check per case."""
    for case in TINY if setup.tiny else CASES:
        yield Check(case.name, partial(check_case, setup, case))


class VirtualRank:
    """One rank: its mailbox, its experts, and the tensors that it keeps between phases."""

    plan: DispatchPlan
    handle: DispatchHandle
    saved: Saved
    pair_Rm: Tensor
    y_PD: Tensor
    rows: Tensor

    def __init__(self, case: Case, heap: VirtualHeap, whole: Weights) -> None:
        mailbox = GpuMailbox(heap, case.layout(), TIMEOUT)
        most, factor = max(case.tokens), case.capacity_factor
        max_pairs = most_pairs(case.layout(), most, case.top_k, case.experts, factor)
        self.transport = RowwiseGpuTransport(mailbox, most, max_pairs)
        self.dispatcher = TokenDispatcher(self.transport, case.experts, factor, "triton")
        local = case.experts // case.num_ranks
        self.weights = whole.of(range(heap.rank * local, (heap.rank + 1) * local))
        mains = (torch.zeros_like(each, dtype=torch.float32) for each in self.weights)
        self.mains = MainGrads(*mains)

    def send(self, tokens: Tokens) -> None:
        """Plan the dispatch, and send rows."""
        labelled = torch.ones(len(tokens.x), dtype=torch.bool, device=tokens.x.device)
        kept = self.dispatcher.apply_capacity(tokens.idx, tokens.weights, labelled)
        ranks, experts = self.transport.num_ranks, self.dispatcher.num_local_experts
        self.plan = make_plan(kept, ranks, experts, backend="triton")
        self.transport.send_rows(tokens.x, self.plan, tokens.weights)

    def receive_and_run(self) -> None:
        """Receive rows, and run the experts."""
        received = self.transport.receive_rows()
        assert received.weights_Rm is not None
        assert received.local_expert_Rm is not None
        self.rows, self.handle = received.x_RD, received.handle
        num_experts = len(self.weights.down)
        layout = expert_layout(received.local_expert_Rm, num_experts, received.max_pairs, "triton")
        weight_P = weight_of_pairs(received.weights_Rm, layout.slot_P)
        gate_up, down = self.weights
        fixed = gate_up, down, layout.row_P, layout.offsets
        self.y_PD, h_P2F = grouped_mlp_fwd(self.rows, weight_P, *fixed)
        self.saved, self.pair_Rm = Saved(self.rows, weight_P, h_P2F, *fixed), layout.pair_Rm

    def return_outputs(self) -> None:
        """Sum the pairs of each row, and return the sums."""
        self.transport.return_pairs(self.y_PD, self.pair_Rm, self.handle)

    def receive_outputs(self) -> Tensor:
        """Sum the returned rows of each token: the layer's output [T, D]."""
        return self.transport.receive_returned_rows(self.plan)[0]

    def send_gradient(self, tokens: Tokens) -> None:
        """Send the gradients of the outputs."""
        recv_counts = self.handle.recv_counts
        self.transport.send_rows(tokens.dout, self.plan, recv_counts=recv_counts)

    def run_backward(self) -> None:
        """Receive gradients, run the experts' backward, and return the gradients of rows."""
        dy_RD = self.transport.receive_rows().x_RD
        dx_PD, dweight_P = grouped_mlp_bwd(dy_RD, self.saved, *self.mains, add=True)
        dweights_Rm = weight_of_slots(dweight_P, self.pair_Rm)
        self.transport.return_pairs(dx_PD, self.pair_Rm, self.handle, dweights_Rm)

    def receive_gradient(self) -> tuple[Tensor, Tensor]:
        """Gradients of the tokens [T, D] and of their router weights [T, K]."""
        dx_TD, dweights_Sm = self.transport.receive_returned_rows(self.plan)
        assert dweights_Sm is not None
        return dx_TD, self.plan.weights_by_route(dweights_Sm)


def check_case(setup: Setup, case: Case) -> Iterator[Row]:
    """Compare all rounds of a case with the reference: sums, rows as received, bytes sent."""
    draw = Draw(setup, case.name)
    whole = draw.experts(case.experts, case.width, case.hidden, case.dtype)
    heaps = virtual_heaps(case.layout(), setup.device)
    ranks = [VirtualRank(case, heap, whole) for heap in heaps]
    reference = whole.leaves(torch.float32)
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    copies: dict[str, tuple[Tensor, Tensor]] = {}
    sizes: dict[str, tuple[Tensor, Tensor]] = {}
    for round_ in range(case.rounds):
        # All ranks have read the rows of the round before: fill the mailboxes with NaN again.
        for heap in heaps:
            heap.arena.fill_(0xFF)
        tokens = [_tokens(draw, case, rank) for rank in range(case.num_ranks)]
        with comm_stats.measure() as sent, poisoned(setup.device):
            results = exchange(ranks, tokens)
        sent.resolve_device_counts()
        # Compare outputs, gradients, received rows and bytes with those of the reference.
        expected = [local(case, of_rank, reference) for of_rank in tokens]
        kept = [kept_TK for *_, kept_TK in expected]
        for name, index in (("out", 0), ("dx", 1), ("router", 2)):
            result, other = (
                torch.cat([of_rank[index] for of_rank in side]) for side in (results, expected)
            )
            sums[f"{name} {round_}"] = result, other
        copies |= {f"{name} {round_}": pair for name, pair in received(case, ranks, tokens, kept)}
        counted = torch.tensor([sent.bytes["rows"], sent.bytes["metadata"]])
        sizes[f"round {round_}"] = counted, predicted_bytes(case, kept)
    for rank in ranks:
        rank.dispatcher.check()
    # The experts' gradients have added up over all rounds.
    for index, name in enumerate(("up", "down")):
        gradient, leaf = torch.cat([rank.mains[index] for rank in ranks]), reference[index]
        assert leaf.grad is not None
        sums[f"experts' {name}"] = gradient, leaf.grad
    yield _worst(case, sums)
    yield equal(f"{case.name}: rows as sent", copies)
    row = equal(f"{case.name}: bytes as predicted", sizes)
    rows, metadata = sizes["round 0"][1].tolist()
    yield row._replace(note=f"{row.note}; round 0: rows {rows:,} B, metadata {metadata:,} B")


def _worst(case: Case, sums: Pairs) -> Row:
    """One row with the largest error per kind of tensor, over all rounds."""
    kinds = dict.fromkeys(name.split()[0] for name in sums)
    flat = {kind: _joined(sums, kind) for kind in kinds}
    return close(case.name, case.dtype, flat)


def _joined(sums: Pairs, kind: str) -> tuple[Tensor, Tensor]:
    # Scale each tensor by its largest value: otherwise the largest tensor hides the others' errors.
    results, expected = [], []
    for name, (result, reference) in sums.items():
        if name.split()[0] == kind:
            peak = reference.detach().abs().max().clamp(min=1e-9) if reference.numel() else 1.0
            results.append((result.detach().float() / peak).flatten())
            expected.append((reference.detach() / peak).flatten())
    return torch.cat(results), torch.cat(expected)


def _tokens(draw: Draw, case: Case, rank: int) -> Tokens:
    count = case.tokens[rank]
    x, dout = (draw.normal(count, case.width, dtype=case.dtype) for _ in range(2))
    return Tokens(x, dout, *draw.routing(case.kind, count, case.experts, case.top_k))


def exchange(ranks: list[VirtualRank], tokens: list[Tokens]) -> list[tuple[Tensor, ...]]:
    """Run all phases. Returns per rank: output, gradients of tokens and of router weights."""
    for rank, inputs in zip(ranks, tokens, strict=True):
        rank.send(inputs)
    for rank in ranks:
        rank.receive_and_run()
    for rank in ranks:
        rank.return_outputs()
    out = [rank.receive_outputs() for rank in ranks]
    for rank, inputs in zip(ranks, tokens, strict=True):
        rank.send_gradient(inputs)
    for rank in ranks:
        rank.run_backward()
    gradients = [rank.receive_gradient() for rank in ranks]
    return [(out_TD, *of_rank) for out_TD, of_rank in zip(out, gradients, strict=True)]


def local(case: Case, tokens: Tokens, whole: Weights) -> tuple[Tensor, ...]:
    """Run all experts on one rank's tokens.

    :param whole: weights of all experts; their gradients add up.
    :returns: output, gradients of tokens and of router weights, experts of the kept routes.
    """
    x = tokens.x.float().requires_grad_()
    weights = tokens.weights.clone().requires_grad_()
    dispatcher = TokenDispatcher(LocalTransport(), case.experts, case.capacity_factor)
    labelled = torch.ones(len(x), dtype=torch.bool, device=x.device)
    kept = dispatcher.apply_capacity(tokens.idx, weights, labelled)
    out = dispatcher.dispatch(x, kept, weights).run_experts(*whole, None, "reference").wait()
    out.backward(tokens.dout.float())
    assert x.grad is not None
    assert weights.grad is not None
    return out.detach(), x.grad, weights.grad, kept


def received(
    case: Case, ranks: list[VirtualRank], tokens: list[Tokens], kept: list[Tensor]
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Per rank: a name, the received rows, and the tokens that must have been sent."""
    for number, rank in enumerate(ranks):
        rows = [
            inputs.x[(routes // (case.experts // case.num_ranks) == number).any(dim=1)]
            for inputs, routes in zip(tokens, kept, strict=True)
        ]
        expected = torch.cat(rows)
        yield f"rank {number}", (rank.rows[: len(expected)], expected)


def predicted_bytes(case: Case, kept: list[Tensor]) -> Tensor:
    """Bytes of rows and of metadata that all ranks send in the four exchanges of a round.

    Each exchange sends one row per token and remote rank.
    """
    owners, pairs = case.experts // case.num_ranks, 0
    for rank, routes in enumerate(kept):
        places = torch.where(routes < 0, -1, routes // owners)
        visits = [(places == other).any(dim=1).sum() for other in range(case.num_ranks)]
        pairs += int(sum(visits)) - int(visits[rank])
    slots = min(case.top_k, owners)
    return torch.tensor([4 * pairs * case.width * case.dtype.itemsize, pairs * slots * 12])
