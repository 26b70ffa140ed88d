"""Rowwise dispatch by kernels: rows are stored straight into the memory of the ranks that want
them, and the host reads nothing but the sizes of what has arrived.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from olmo_shard.dispatch.device_mailbox import DeviceMailbox
from olmo_shard.dispatch.dispatcher import Experts, Flight, TokenDispatcher
from olmo_shard.dispatch.exchange import DeviceCounts, DispatchHandle, Received, RecvCounts
from olmo_shard.dispatch.expert_side import run_on_expert_side
from olmo_shard.dispatch.plan import DispatchPlan, make_plan
from olmo_shard.distributed.comm_stats import comm_stats
from olmo_shard.kernels.capacity import most_routes
from olmo_shard.kernels.pull_rows import pull_rows, pull_weights
from olmo_shard.kernels.push_rows import push_rows
from olmo_shard.kernels.reduce_and_push import reduce_and_push
from olmo_shard.kernels.row_moves import RowList
from olmo_shard.kernels.sum_rows import sum_rows


@dataclass(frozen=True, kw_only=True)
class _Outward:
    """This rank's part of a push, until the pull."""

    x_TD: Tensor
    plan: DispatchPlan
    sent: RowList
    counts: DeviceCounts | None
    """Where a dispatch has told what comes."""


@dataclass(frozen=True, kw_only=True)
class _Back:
    """This rank's rows for itself, from a push_back until the pull."""

    rows: Tensor
    weights_Rm: Tensor | None
    counts_W: Tensor


class DeviceRowwiseDispatcher(TokenDispatcher):
    """Kernels put each row, and what belongs to it, into a mailbox of the rank that wants it.

    Without a capacity factor the host reads, once a layer and forward, how many rows and pairs have
    arrived, to allocate for them. With one it reads nothing: tensors have their largest size.

    :param mailbox: of this rank; closed with the dispatcher.
    :param max_tokens: of a rank's micro-batch, for which the mailbox was made.
    """

    name = "rowwise"

    def __init__(
        self,
        num_experts: int,
        mailbox: DeviceMailbox,
        max_tokens: int,
        capacity_factor: float | None = None,
    ) -> None:
        heap = mailbox.heap
        super().__init__(num_experts, heap.rank, heap.size, capacity_factor, "triton")
        self.mailbox, self.max_tokens = mailbox, max_tokens
        self._outward: _Outward | None = None
        self._back: _Back | None = None

    def plan(self, topk_idx_TK: Tensor, layer: int) -> DispatchPlan:
        return make_plan(topk_idx_TK, self.num_ranks, self.num_local_experts, layer, "triton")

    def run(self, flight: Flight, experts: Experts) -> Tensor:
        """As everywhere, but the experts' pairs are summed on their way into the mailboxes."""
        return run_on_expert_side(flight, experts, self)

    def push(
        self,
        x_TD: Tensor,
        plan: DispatchPlan,
        topk_weights_TK: Tensor | None = None,
        recv_counts: RecvCounts | None = None,
    ) -> None:
        sent = RowList(counts_W=plan.send_counts_W, row_S=plan.token_S)
        if topk_weights_TK is not None:
            sent = sent._replace(
                routes_W=plan.send_routes_W,
                weights_Sm=plan.weights_by_slot(topk_weights_TK),
                local_expert_Sm=plan.local_expert_Sm,
            )
        x_TD = self._fitting(x_TD)
        mailbox = self.mailbox

        def fill() -> None:
            most = len(plan.token_S)
            push_rows(x_TD, sent, mailbox.targets, mailbox.epoch, mailbox.regions, most)

        mailbox.put(fill, sent.counts_W, with_metadata=topk_weights_TK is not None)
        self._count(plan.send_counts_W, plan.layer, 0 if topk_weights_TK is None else 8)
        assert recv_counts is None or isinstance(recv_counts, DeviceCounts)
        self._outward = _Outward(x_TD=x_TD, plan=plan, sent=sent, counts=recv_counts)

    def pull(self) -> Received:
        assert self._outward is not None, "no push is outstanding"
        outward, self._outward = self._outward, None
        mailbox, sent, counts = self.mailbox, outward.sent, outward.counts
        arrived = mailbox.wait(outward.plan.layer, sent.counts_W, sent.routes_W)
        max_pairs = 0
        if counts is None:
            max_rows, max_pairs = self._sizes(arrived.totals, outward.plan)
            counts = DeviceCounts(arrived.counts_W, max_rows)
        rows_RD, weights_Rm, local_expert_Rm = pull_rows(
            outward.x_TD,
            sent,
            arrived.counts_W,
            mailbox.heap.arena,
            mailbox.epoch,
            mailbox.regions,
            counts.max_rows,
        )
        return Received(rows_RD, weights_Rm, local_expert_Rm, max_pairs, counts)

    def push_back(
        self, rows_RD: Tensor, handle: DispatchHandle, weights_Rm: Tensor | None = None
    ) -> None:
        pair_Rm = rows_RD.new_full(
            (len(rows_RD), self.mailbox.layout.num_slots), -1, dtype=torch.int32
        )
        pair_Rm[:, 0] = torch.arange(len(rows_RD), dtype=torch.int32, device=rows_RD.device)
        self.push_pairs_back(rows_RD, pair_Rm, handle, weights_Rm)

    def push_pairs_back(
        self,
        y_PD: Tensor,
        pair_Rm: Tensor,
        handle: DispatchHandle,
        weights_Rm: Tensor | None = None,
    ) -> None:
        """Start to return the sum of each received row's pairs.

        :param pair_Rm: int32: the pairs of each row, -1 in empty slots.
        """
        mailbox, counts = self.mailbox, handle.recv_counts
        assert isinstance(counts, DeviceCounts)
        y_PD = self._fitting(y_PD)
        own_rows = y_PD.new_empty(handle.plan.num_tokens, y_PD.shape[1])
        weights_Rm = None if weights_Rm is None else weights_Rm.contiguous()

        def fill() -> None:
            reduce_and_push(
                y_PD,
                pair_Rm,
                counts.counts_W,
                weights_Rm,
                mailbox.targets,
                mailbox.epoch,
                mailbox.regions,
                own_rows,
            )

        mailbox.put(fill, counts.counts_W, with_metadata=weights_Rm is not None)
        self._count(counts.counts_W, handle.plan.layer, 0 if weights_Rm is None else 4)
        self._back = _Back(rows=own_rows, weights_Rm=weights_Rm, counts_W=counts.counts_W)

    def pull_back(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        assert self._back is not None, "no push_back is outstanding"
        own, self._back = self._back, None
        mailbox = self.mailbox
        arrived = mailbox.wait(plan.layer, own.counts_W)
        # Where rows lie follows from what was sent, whatever has come.
        place = plan.send_counts_W, plan.row_WT, mailbox.heap.arena, mailbox.epoch, mailbox.regions
        out_TD = sum_rows(own.rows, *place, arrived.totals)
        if own.weights_Rm is None:
            return out_TD, None
        weights_Sm = pull_weights(
            own.weights_Rm,
            own.counts_W,
            plan.send_counts_W,
            mailbox.heap.arena,
            mailbox.epoch,
            mailbox.regions,
            len(plan.token_S),
        )
        return out_TD, weights_Sm

    def check(self) -> None:
        self.mailbox.check("after a step")

    def close(self) -> None:
        self.mailbox.close()

    def _fitting(self, rows: Tensor) -> Tensor:
        layout = self.mailbox.layout
        assert (rows.dtype, rows.shape[1]) == (layout.dtype, layout.width), "not the mailbox's rows"
        return rows.contiguous()

    def _sizes(self, totals: Tensor, plan: DispatchPlan) -> tuple[int, int]:
        """Rows and pairs that have arrived; with a capacity factor, what could have at most."""
        layout, factor = self.mailbox.layout, self.capacity_factor
        if factor is None:
            rows, pairs, num_errors = totals.tolist()
            if num_errors:
                self.mailbox.check(f"layer {plan.layer}")
            return rows, pairs
        assert self.max_tokens is not None
        max_rows = layout.max_rows * self.num_ranks
        capacity = most_routes(self.max_tokens, plan.slot_TK.shape[1], self.num_experts, factor)
        pairs = self.num_local_experts * capacity * self.num_ranks
        return max_rows, min(pairs, max_rows * layout.num_slots)

    def _count(self, counts_W: Tensor, layer: int, slot_bytes: int) -> None:
        """Note what was sent; one header and one flag a peer apart, and what a put to another node
        sends of metadata behind the last row.

        :param slot_bytes: that travel with a row for each of its slots.
        """
        layout = self.mailbox.layout
        remote = counts_W.sum() - counts_W[self.rank]
        comm_stats.add_device_count("rows", remote, layout.width * layout.dtype.itemsize, layer)
        if slot_bytes:
            comm_stats.add_device_count("metadata", remote, layout.num_slots * slot_bytes, layer)
