"""Rowwise dispatch on CPUs: rows are copied into the memory of the ranks that need them.

Shape letters: T tokens, D width, W ranks, m slots of a row, S rows sent, R rows received.
"""

import torch
from torch import Tensor

from olmo_shard.dispatch.buffer_pool import BufferPool
from olmo_shard.dispatch.mailbox.mailbox_cpu import CpuMailbox
from olmo_shard.dispatch.mailbox.mailbox_layout import Region
from olmo_shard.dispatch.row_plan import DispatchPlan
from olmo_shard.dispatch.rowwise.rowwise_common import (
    COMBINE_METADATA_BYTES,
    DISPATCH_METADATA_BYTES,
    OutstandingExchange,
    ReturnedRows,
    SentRows,
    assert_row_type,
)
from olmo_shard.dispatch.sum_returned_rows import sum_returned_rows
from olmo_shard.dispatch.transport import DispatchHandle, ReceivedRows, RecvCounts, Transport
from olmo_shard.distributed.comm_stats import comm_stats


class RowwiseCpuTransport(Transport):
    """Copies each row, and its metadata, into a mailbox of the rank that needs it.

    Rows for this rank itself stay in place until they are copied to where they are needed.

    :param mailbox: this rank's mailbox, which is closed with the transport.
    :param max_tokens: tokens per micro-batch for which the mailbox was made.
    """

    name = "rowwise"

    def __init__(self, mailbox: CpuMailbox, max_tokens: int) -> None:
        self.mailbox, self.max_tokens = mailbox, max_tokens
        self.rank, self.num_ranks = mailbox.heap.rank, mailbox.heap.size
        layout = mailbox.layout
        # All tokens of this rank, and a full region of each peer.
        most_rows = max_tokens + (self.num_ranks - 1) * layout.max_rows
        self._rows = BufferPool(most_rows * layout.width * layout.dtype.itemsize)
        self._sums = BufferPool(max_tokens * layout.width * torch.float32.itemsize)
        self._exchange = OutstandingExchange()

    def send_rows(
        self,
        x_TD: Tensor,
        plan: DispatchPlan,
        topk_weights_TK: Tensor | None = None,
        recv_counts: RecvCounts | None = None,
    ) -> None:
        """See :meth:`Transport.send_rows`."""
        self._assert_fits(x_TD, plan.send_counts)
        weights_Sm = None if topk_weights_TK is None else plan.weights_by_slot(topk_weights_TK)
        weights_of = None if weights_Sm is None else weights_Sm.split(plan.send_counts)
        experts_of = plan.local_expert_Sm.split(plan.send_counts)
        # Every peer gets its count and its flag, with or without rows: see [Note: mailbox].
        for peer, region in self.mailbox.begin_put():
            tokens = plan.tokens_of_rank[peer]
            region.num_rows.fill_(len(tokens))
            torch.index_select(x_TD, 0, tokens, out=region.rows[: len(tokens)])
            if weights_of is not None:
                region.weights[: len(tokens)] = weights_of[peer]
                region.local_expert[: len(tokens)] = experts_of[peer]
            self.mailbox.end_put(peer)
        metadata = 0 if weights_Sm is None else DISPATCH_METADATA_BYTES
        self._count_bytes(plan, plan.send_counts, metadata)
        self._exchange.start(
            SentRows(x_TD=x_TD, plan=plan, weights_Sm=weights_Sm, recv_counts=recv_counts)
        )

    def receive_rows(self) -> ReceivedRows:
        """See :meth:`Transport.receive_rows`."""
        sent = self._exchange.take_sent()
        plan, weights_Sm = sent.plan, sent.weights_Sm
        with self.mailbox.consume(plan.layer) as regions:
            counts = self._counts(regions, own=plan.send_counts[self.rank])
            # In a backward pass the counts are known, and must arrive again.
            expected = sent.recv_counts
            assert expected is None or counts == expected.on_host, "not the counts of the dispatch"
            rows_RD = self._copy_out(sent, regions, counts)
            weights_Rm = local_expert_Rm = None
            if weights_Sm is not None:
                own_weights = weights_Sm.split(plan.send_counts)[self.rank]
                own_experts = plan.local_expert_Sm.split(plan.send_counts)[self.rank]
                weights = {peer: region.weights for peer, region in regions.items()}
                experts = {peer: region.local_expert for peer, region in regions.items()}
                weights_Rm = torch.cat(self._by_rank(own_weights, weights, counts))
                local_expert_Rm = torch.cat(self._by_rank(own_experts, experts, counts))
        # From here on peers may overwrite the regions: everything has been copied out.
        recv_counts = RecvCounts(counts_W=torch.tensor(counts), max_rows=sum(counts))
        return ReceivedRows(
            x_RD=rows_RD,
            weights_Rm=weights_Rm,
            local_expert_Rm=local_expert_Rm,
            max_pairs=sum(counts) * self.mailbox.layout.num_slots,
            handle=DispatchHandle(plan=plan, recv_counts=recv_counts),
        )

    def return_rows(
        self, rows_RD: Tensor, handle: DispatchHandle, weights_Rm: Tensor | None = None
    ) -> None:
        """See :meth:`Transport.return_rows`."""
        counts = handle.recv_counts.on_host
        self._assert_fits(rows_RD, counts)
        rows_of = rows_RD.split(counts)
        weights_of = None if weights_Rm is None else weights_Rm.split(counts)
        for peer, region in self.mailbox.begin_put():
            num_rows = len(rows_of[peer])
            region.num_rows.fill_(num_rows)
            region.rows[:num_rows] = rows_of[peer]
            if weights_of is not None:
                region.weights[:num_rows] = weights_of[peer]
            self.mailbox.end_put(peer)
        self._count_bytes(handle.plan, counts, 0 if weights_of is None else COMBINE_METADATA_BYTES)
        self._exchange.start(
            ReturnedRows(
                own_rows=rows_of[self.rank], weights_Rm=weights_Rm, recv_counts=handle.recv_counts
            )
        )

    def receive_returned_rows(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Transport.receive_returned_rows`."""
        returned = self._exchange.take_returned()
        own_rows, weights_Rm = returned.own_rows, returned.weights_Rm
        with self.mailbox.consume(plan.layer) as regions:
            counts = self._counts(regions, own=len(own_rows))
            assert counts == plan.send_counts, "not as many rows came back as were sent"
            # Rows are added while they are in the mailbox, without a copy.
            out_TD = self._sums.empty((plan.num_tokens, own_rows.shape[1]), torch.float32)
            rows = {peer: region.rows for peer, region in regions.items()}
            sums_TD = sum_returned_rows(self._by_rank(own_rows, rows, counts), plan, out_TD)
            if weights_Rm is None:
                return sums_TD, None
            own_weights = weights_Rm.split(returned.recv_counts.on_host)[self.rank]
            weights = {peer: region.weights for peer, region in regions.items()}
            return sums_TD, torch.cat(self._by_rank(own_weights, weights, counts))

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self.mailbox.close()

    def _assert_fits(self, rows: Tensor, counts: list[int]) -> None:
        """More rows than a region has would overflow into the next region."""
        layout = self.mailbox.layout
        assert_row_type(rows, layout)
        to_peers = (count for rank, count in enumerate(counts) if rank != self.rank)
        assert max(to_peers, default=0) <= layout.max_rows, "more rows than the mailbox has"

    def _counts(self, regions: dict[int, Region], own: int) -> list[int]:
        """Number of rows from each rank."""
        ranks = range(self.num_ranks)
        return [own if rank == self.rank else int(regions[rank].num_rows) for rank in ranks]

    def _copy_out(self, sent: SentRows, regions: dict[int, Region], counts: list[int]) -> Tensor:
        """The rows of all ranks, [R, D]; this rank's rows come straight from its tokens."""
        x_TD, own_tokens = sent.x_TD, sent.plan.tokens_of_rank[self.rank]
        rows_RD = self._rows.empty((sum(counts), x_TD.shape[1]), x_TD.dtype)
        for source, rows in enumerate(rows_RD.split(counts)):
            if source == self.rank:
                torch.index_select(x_TD, 0, own_tokens, out=rows)
            else:
                rows.copy_(regions[source].rows[: len(rows)])
        return rows_RD

    def _by_rank(
        self, own: Tensor, from_peers: dict[int, Tensor], counts: list[int]
    ) -> list[Tensor]:
        """One part of what came from each rank, in rank order."""
        return [
            own if rank == self.rank else from_peers[rank][:count]
            for rank, count in enumerate(counts)
        ]

    def _count_bytes(self, plan: DispatchPlan, counts: list[int], slot_bytes: int) -> None:
        """Count the bytes sent, without the row count and the flag of each peer.

        :param slot_bytes: bytes of metadata that travel for each slot of a row.
        """
        layout = self.mailbox.layout
        remote = sum(counts) - counts[self.rank]
        comm_stats.add("rows", remote * layout.width * layout.dtype.itemsize, plan.layer)
        if slot_bytes:
            comm_stats.add("metadata", remote * layout.num_slots * slot_bytes, plan.layer)
