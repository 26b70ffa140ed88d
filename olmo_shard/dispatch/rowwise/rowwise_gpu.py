"""Rowwise dispatch on GPUs: kernels store rows into the memory of the ranks that need them.

The host reads nothing but the numbers of rows and pairs that have arrived, and with a capacity
factor not even those.

Shape letters: T tokens, D width, W ranks, m slots of a row, S rows sent, R rows received, P pairs
of a received row and a local expert.
"""

import torch
from torch import Tensor

from olmo_shard.dispatch.mailbox.mailbox_gpu import Arrived, GpuMailbox
from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout
from olmo_shard.dispatch.row_plan import DispatchPlan
from olmo_shard.dispatch.rowwise.rowwise_common import (
    COMBINE_METADATA_BYTES,
    DISPATCH_METADATA_BYTES,
    OutstandingExchange,
    ReturnedRows,
    SentRows,
    assert_row_type,
)
from olmo_shard.dispatch.transport import (
    DispatchHandle,
    PairTransport,
    ReceivedRows,
    RecvCounts,
)
from olmo_shard.distributed.comm_stats import comm_stats
from olmo_shard.kernels.copy_received_rows import copy_received_rows, copy_returned_weights
from olmo_shard.kernels.put_rows import put_rows
from olmo_shard.kernels.reduce_and_put import reduce_and_put
from olmo_shard.kernels.route_capacity import most_routes
from olmo_shard.kernels.row_moves import RowList
from olmo_shard.kernels.sum_rows import sum_rows


class RowwiseGpuTransport(PairTransport):
    """Kernels store each row, and its metadata, into a mailbox of the rank that needs it.

    :param mailbox: this rank's mailbox, which is closed with the transport.
    :param max_tokens: tokens per micro-batch for which the mailbox was made.
    :param max_pairs: what ``most_pairs`` returns. If ``None``, the host reads the numbers of rows
        and pairs that have arrived, once per layer and forward, to allocate for them; else it reads
        nothing, and tensors have their largest size.
    """

    name = "rowwise"
    plan_backend = "triton"

    def __init__(self, mailbox: GpuMailbox, max_tokens: int, max_pairs: int | None = None) -> None:
        self.mailbox, self.max_tokens, self.max_pairs = mailbox, max_tokens, max_pairs
        self.rank, self.num_ranks = mailbox.heap.rank, mailbox.heap.size
        self._exchange = OutstandingExchange()

    def send_rows(
        self,
        x_TD: Tensor,
        plan: DispatchPlan,
        topk_weights_TK: Tensor | None = None,
        recv_counts: RecvCounts | None = None,
    ) -> None:
        """See :meth:`Transport.send_rows`."""
        weights_Sm = None if topk_weights_TK is None else plan.weights_by_slot(topk_weights_TK)
        x_TD = self._contiguous(x_TD)
        sent = SentRows(x_TD=x_TD, plan=plan, weights_Sm=weights_Sm, recv_counts=recv_counts)
        # Rows for this rank are not pushed: receive_rows copies them from x_TD.
        mailbox, with_metadata = self.mailbox, weights_Sm is not None
        mailbox.begin_put()
        put_rows(
            x_TD,
            _row_list(sent),
            mailbox.peer_ptrs,
            mailbox.epoch,
            mailbox.regions,
            len(plan.token_S),
        )
        mailbox.end_put(plan.send_counts_W, with_metadata=with_metadata)
        metadata = DISPATCH_METADATA_BYTES if with_metadata else 0
        self._count_bytes(plan.send_counts_W, plan.layer, metadata)
        self._exchange.start(sent)

    def receive_rows(self) -> ReceivedRows:
        """See :meth:`Transport.receive_rows`."""
        sent = self._exchange.take_sent()
        mailbox, plan, rows_sent = self.mailbox, sent.plan, _row_list(sent)
        arrived = mailbox.wait(plan.layer, rows_sent.counts_W, rows_sent.routes_W)
        # In a backward pass the sizes are known from the forward.
        recv_counts, max_pairs = sent.recv_counts, None
        if recv_counts is None:
            max_rows, max_pairs = self._sizes(arrived, plan)
            recv_counts = RecvCounts(counts_W=arrived.counts_W, max_rows=max_rows)
        rows_RD, weights_Rm, local_expert_Rm = copy_received_rows(
            sent.x_TD,
            rows_sent,
            arrived.counts_W,
            mailbox.heap.arena,
            mailbox.epoch,
            mailbox.regions,
            recv_counts.max_rows,
        )
        return ReceivedRows(
            x_RD=rows_RD,
            weights_Rm=weights_Rm,
            local_expert_Rm=local_expert_Rm,
            max_pairs=max_pairs,
            handle=DispatchHandle(plan=plan, recv_counts=recv_counts),
        )

    def return_rows(
        self, rows_RD: Tensor, handle: DispatchHandle, weights_Rm: Tensor | None = None
    ) -> None:
        """See :meth:`Transport.return_rows`. Each row is returned as the sum of one pair."""
        shape = len(rows_RD), self.mailbox.layout.num_slots
        pair_Rm = rows_RD.new_full(shape, -1, dtype=torch.int32)
        pair_Rm[:, 0] = torch.arange(len(rows_RD), dtype=torch.int32, device=rows_RD.device)
        self.return_pairs(rows_RD, pair_Rm, handle, weights_Rm)

    def return_pairs(
        self,
        y_PD: Tensor,
        pair_Rm: Tensor,
        handle: DispatchHandle,
        weights_Rm: Tensor | None = None,
    ) -> None:
        """See :meth:`PairTransport.return_pairs`."""
        mailbox, counts_W = self.mailbox, handle.recv_counts.counts_W
        y_PD = self._contiguous(y_PD)
        # Sums of rows that came from this rank itself never enter a mailbox.
        own_rows = y_PD.new_empty(handle.plan.num_tokens, y_PD.shape[1])
        weights_Rm = None if weights_Rm is None else weights_Rm.contiguous()
        mailbox.begin_put()
        reduce_and_put(
            y_PD,
            pair_Rm,
            counts_W,
            weights_Rm,
            mailbox.peer_ptrs,
            mailbox.epoch,
            mailbox.regions,
            own_rows,
        )
        mailbox.end_put(counts_W, with_metadata=weights_Rm is not None)
        metadata = 0 if weights_Rm is None else COMBINE_METADATA_BYTES
        self._count_bytes(counts_W, handle.plan.layer, metadata)
        self._exchange.start(
            ReturnedRows(own_rows=own_rows, weights_Rm=weights_Rm, recv_counts=handle.recv_counts)
        )

    def receive_returned_rows(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Transport.receive_returned_rows`."""
        returned = self._exchange.take_returned()
        mailbox, own_counts_W = self.mailbox, returned.recv_counts.counts_W
        arrived = mailbox.wait(plan.layer, own_counts_W)
        # The places of the returned rows follow from the rows sent, whatever has arrived.
        place = mailbox.heap.arena, mailbox.epoch, mailbox.regions
        sent_counts_W = plan.send_counts_W
        out_TD = sum_rows(returned.own_rows, sent_counts_W, plan.row_WT, *place, arrived.totals)
        if returned.weights_Rm is None:
            return out_TD, None
        weights_Sm = copy_returned_weights(
            returned.weights_Rm, own_counts_W, sent_counts_W, *place, len(plan.token_S)
        )
        return out_TD, weights_Sm

    def check(self) -> None:
        """See :meth:`Transport.check`."""
        self.mailbox.check("after a step")

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self.mailbox.close()

    def _contiguous(self, rows: Tensor) -> Tensor:
        assert_row_type(rows, self.mailbox.layout)
        return rows.contiguous()

    def _sizes(self, arrived: Arrived, plan: DispatchPlan) -> tuple[int, int]:
        """Numbers of rows and pairs that have arrived, or upper bounds on them."""
        if self.max_pairs is None:
            # The one read of the host per layer and forward; it waits for the peers' flags.
            rows, pairs, num_errors = arrived.totals.tolist()
            if num_errors:
                self.mailbox.check(f"layer {plan.layer}")
            return rows, pairs
        return self.mailbox.layout.max_rows * self.num_ranks, self.max_pairs

    def _count_bytes(self, counts_W: Tensor, layer: int, slot_bytes: int) -> None:
        """Count the bytes sent, without the header and the flag of each peer.

        The count also leaves out the unused metadata that a put to a remote peer sends.

        :param slot_bytes: bytes of metadata that travel for each slot of a row.
        """
        layout = self.mailbox.layout
        remote = counts_W.sum() - counts_W[self.rank]
        comm_stats.add_device_count("rows", remote, layout.width * layout.dtype.itemsize, layer)
        if slot_bytes:
            comm_stats.add_device_count("metadata", remote, layout.num_slots * slot_bytes, layer)


def most_pairs(
    layout: MailboxLayout,
    max_tokens: int,
    top_k: int,
    num_experts: int,
    capacity_factor: float | None,
) -> int | None:
    """Largest number of pairs that a rank receives; ``None`` without a capacity factor.

    :param max_tokens: largest number of tokens per rank and micro-batch.
    """
    if capacity_factor is None:
        return None
    capacity = most_routes(max_tokens, top_k, num_experts, capacity_factor)
    # Each rank sends at most ``capacity`` routes to each of the num_experts / W local experts.
    return min(num_experts * capacity, layout.max_rows * layout.num_ranks * layout.num_slots)


def _row_list(sent: SentRows) -> RowList:
    """The rows sent, in the form in which the kernels take them."""
    plan = sent.plan
    rows = RowList(counts_W=plan.send_counts_W, row_S=plan.token_S)
    if sent.weights_Sm is None:
        return rows
    return rows._replace(
        routes_W=plan.send_routes_W,
        weights_Sm=sent.weights_Sm,
        local_expert_Sm=plan.local_expert_Sm,
    )
