"""Rows are written straight into the memory of the ranks that want them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from olmo_shard.dispatch.buffer_pool import BufferPool
from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.exchange import DispatchHandle, Received, RecvCounts, on_host
from olmo_shard.dispatch.mailbox import Mailbox, Region
from olmo_shard.dispatch.plan import DispatchPlan
from olmo_shard.dispatch.sum_rows import sum_rows
from olmo_shard.distributed.comm_stats import comm_stats


@dataclass(frozen=True, kw_only=True)
class _Outward:
    """This rank's part of a push, until the pull."""

    x_TD: Tensor
    plan: DispatchPlan
    weights_Sm: Tensor | None
    """Null: rows travel alone."""
    recv_counts: list[int] | None


@dataclass(frozen=True, kw_only=True)
class _Back:
    """This rank's rows for itself, from a push_back until the pull."""

    rows: Tensor
    weights: Tensor | None


class RowwiseDispatcher(TokenDispatcher):
    """Puts each row, and what belongs to it, into a mailbox of the rank that wants it; on CPUs.

    Counts arrive with the rows, so nothing is exchanged beforehand. Rows for this rank itself stay
    where they are until they are copied to where they are wanted.

    :param mailbox: of this rank; closed with the dispatcher.
    :param max_tokens: of a rank's micro-batch, for which the mailbox was made.
    """

    name = "rowwise"

    def __init__(
        self,
        num_experts: int,
        mailbox: Mailbox,
        max_tokens: int,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__(num_experts, mailbox.heap.rank, mailbox.heap.size, capacity_factor)
        self.mailbox, self.max_tokens = mailbox, max_tokens
        layout = mailbox.layout
        most_rows = max_tokens + (self.num_ranks - 1) * layout.max_rows
        self._rows = BufferPool(most_rows * layout.width * layout.dtype.itemsize)
        self._sums = BufferPool(max_tokens * layout.width * torch.float32.itemsize)
        self._outward: _Outward | None = None
        self._back: _Back | None = None

    def push(
        self,
        x_TD: Tensor,
        plan: DispatchPlan,
        topk_weights_TK: Tensor | None = None,
        recv_counts: RecvCounts | None = None,
    ) -> None:
        self._check_fits(x_TD, plan.send_counts)
        weights_Sm = None if topk_weights_TK is None else plan.weights_by_slot(topk_weights_TK)
        weights_of = None if weights_Sm is None else weights_Sm.split(plan.send_counts)
        experts_of = plan.local_expert_Sm.split(plan.send_counts)

        def write(peer: int, region: Region) -> None:
            tokens = plan.tokens_of_rank[peer]
            region.num_rows.fill_(len(tokens))
            torch.index_select(x_TD, 0, tokens, out=region.rows[: len(tokens)])
            if weights_of is not None:
                region.weights[: len(tokens)] = weights_of[peer]
                region.local_expert[: len(tokens)] = experts_of[peer]

        self.mailbox.put(write)
        self._count(plan, plan.send_counts, 0 if weights_of is None else 8)
        self._outward = _Outward(
            x_TD=x_TD,
            plan=plan,
            weights_Sm=weights_Sm,
            recv_counts=None if recv_counts is None else on_host(recv_counts),
        )

    def pull(self) -> Received:
        assert self._outward is not None, "no push is outstanding"
        outward, self._outward = self._outward, None
        plan, weights_Sm = outward.plan, outward.weights_Sm
        self._wait(plan)
        with self.mailbox.consume() as regions:
            counts = self._counts(regions, own=plan.send_counts[self.rank])
            assert outward.recv_counts in (None, counts), "not the counts of the dispatch"
            rows_RD = self._copy_out(outward, regions, counts)
            if weights_Sm is None:
                return Received(rows_RD, None, None, 0, counts)
            own_weights = weights_Sm.split(plan.send_counts)[self.rank]
            own_experts = plan.local_expert_Sm.split(plan.send_counts)[self.rank]
            weights = self._by_rank(own_weights, regions, "weights", counts)
            experts = self._by_rank(own_experts, regions, "local_expert", counts)
            local_expert_Rm = torch.cat(experts)
            most = local_expert_Rm.numel()
            return Received(rows_RD, torch.cat(weights), local_expert_Rm, most, counts)

    def push_back(
        self, rows_RD: Tensor, handle: DispatchHandle, weights_Rm: Tensor | None = None
    ) -> None:
        counts = on_host(handle.recv_counts)
        self._check_fits(rows_RD, counts)
        rows_of = rows_RD.split(counts)
        weights_of = None if weights_Rm is None else weights_Rm.split(counts)

        def write(peer: int, region: Region) -> None:
            num_rows = len(rows_of[peer])
            region.num_rows.fill_(num_rows)
            region.rows[:num_rows] = rows_of[peer]
            if weights_of is not None:
                region.weights[:num_rows] = weights_of[peer]

        self.mailbox.put(write)
        self._count(handle.plan, counts, 0 if weights_of is None else 4)
        own_weights = None if weights_of is None else weights_of[self.rank]
        self._back = _Back(rows=rows_of[self.rank], weights=own_weights)

    def pull_back(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        assert self._back is not None, "no push_back is outstanding"
        own, self._back = self._back, None
        self._wait(plan)
        with self.mailbox.consume() as regions:
            counts = self._counts(regions, own=len(own.rows))
            assert counts == plan.send_counts, "not as many rows came back as were sent"
            out_TD = self._sums.empty((plan.num_tokens, own.rows.shape[1]), torch.float32)
            sums_TD = sum_rows(self._by_rank(own.rows, regions, "rows", counts), plan, out_TD)
            if own.weights is None:
                return sums_TD, None
            return sums_TD, torch.cat(self._by_rank(own.weights, regions, "weights", counts))

    def close(self) -> None:
        self.mailbox.close()

    def _check_fits(self, rows: Tensor, counts: list[int]) -> None:
        """Larger rows, or more of them, would end in what lies behind the region."""
        layout = self.mailbox.layout
        assert (rows.dtype, rows.shape[1]) == (layout.dtype, layout.width), "not the mailbox's rows"
        remote = (count for rank, count in enumerate(counts) if rank != self.rank)
        assert max(remote, default=0) <= layout.max_rows, "more rows than the mailbox has"

    def _wait(self, plan: DispatchPlan) -> None:
        with comm_stats.waiting("rows", torch.device("cpu"), plan.layer):
            self.mailbox.wait(f"layer {plan.layer}")

    def _counts(self, regions: dict[int, Region], own: int) -> list[int]:
        """Rows from each rank."""
        ranks = range(self.num_ranks)
        return [own if rank == self.rank else int(regions[rank].num_rows) for rank in ranks]

    def _copy_out(self, outward: _Outward, regions: dict[int, Region], counts: list[int]) -> Tensor:
        """The rows of all ranks, this rank's own straight from its tokens: [R, D]."""
        x_TD, own_tokens = outward.x_TD, outward.plan.tokens_of_rank[self.rank]
        rows_RD = self._rows.empty((sum(counts), x_TD.shape[1]), x_TD.dtype)
        for source, rows in enumerate(rows_RD.split(counts)):
            if source == self.rank:
                torch.index_select(x_TD, 0, own_tokens, out=rows)
            else:
                rows.copy_(regions[source].rows[: len(rows)])
        return rows_RD

    def _by_rank(
        self, own: Tensor, regions: dict[int, Region], part: str, counts: list[int]
    ) -> list[Tensor]:
        """One part of what came from each rank, in rank order."""
        return [
            own if rank == self.rank else getattr(regions[rank], part)[:count]
            for rank, count in enumerate(counts)
        ]

    def _count(self, plan: DispatchPlan, counts: list[int], slot_bytes: int) -> None:
        """Note what was sent; one count and one flag a peer apart.

        :param slot_bytes: that travel with a row for each of its slots.
        """
        layout = self.mailbox.layout
        remote = sum(counts) - counts[self.rank]
        comm_stats.add("rows", remote * layout.width * layout.dtype.itemsize, plan.layer)
        if slot_bytes:
            comm_stats.add("metadata", remote * layout.num_slots * slot_bytes, plan.layer)
