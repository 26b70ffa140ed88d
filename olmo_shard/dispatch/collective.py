"""Rows travel by all-to-all, on gloo or NCCL: the reference transport, and the way across hosts.

Shape letters: T tokens, D width, K top-k, W ranks of the expert-parallel group, m slots of a row,
S rows sent, R rows received.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.dispatch.row_plan import DispatchPlan
from olmo_shard.dispatch.sum_returned_rows import sum_returned_rows
from olmo_shard.dispatch.transport import DispatchHandle, ReceivedRows, RecvCounts, Transport
from olmo_shard.distributed import collectives
from olmo_shard.distributed.work import Work

_ALIGNMENT = 8
"""Alignment in bytes of each field of a packed row, so that it can be viewed in its own type."""


@dataclass(frozen=True, kw_only=True)
class _Field:
    """One tensor of a payload, as a part of each packed row."""

    start: int
    """First byte in the row."""
    elements: int
    dtype: torch.dtype

    def of(self, packed: Tensor) -> Tensor:
        """The field of all packed rows: [rows, elements], a view."""
        stop = self.start + self.elements * self.dtype.itemsize
        return packed[:, self.start : stop].view(self.dtype)


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """An all-to-all under way."""

    work: Work
    packed: Tensor
    """uint8 [rows, bytes of a packed row]: what this rank receives."""
    fields: list[_Field]
    handle: DispatchHandle


class CollectiveTransport(Transport):
    """One all-to-all of variable sizes per exchange. The tensors of a payload are packed by row.

    :param group: the expert-parallel process group.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.num_ranks = group.rank(), group.size()
        self._exchange: _Exchange | None = None

    def send_rows(
        self,
        x_TD: Tensor,
        plan: DispatchPlan,
        topk_weights_TK: Tensor | None = None,
        recv_counts: RecvCounts | None = None,
    ) -> None:
        """See :meth:`Transport.send_rows`. Exchanges the counts first where it must."""
        # All-to-all needs the rows of each rank side by side.
        payload = [x_TD[plan.token_S]]
        if topk_weights_TK is not None:
            payload += [plan.weights_by_slot(topk_weights_TK), plan.local_expert_Sm]
        counts = self._exchange_counts(plan) if recv_counts is None else recv_counts
        handle = DispatchHandle(plan=plan, recv_counts=counts)
        self._start(payload, plan.send_counts, counts.on_host, handle)

    def receive_rows(self) -> ReceivedRows:
        """See :meth:`Transport.receive_rows`."""
        (rows_RD, *metadata), handle = self._finish()
        weights_Rm, local_expert_Rm = metadata or (None, None)
        return ReceivedRows(
            x_RD=rows_RD,
            weights_Rm=weights_Rm,
            local_expert_Rm=local_expert_Rm,
            max_pairs=None,
            handle=handle,
        )

    def return_rows(
        self, rows_RD: Tensor, handle: DispatchHandle, weights_Rm: Tensor | None = None
    ) -> None:
        """See :meth:`Transport.return_rows`."""
        payload = [rows_RD] if weights_Rm is None else [rows_RD, weights_Rm]
        self._start(payload, handle.recv_counts.on_host, handle.plan.send_counts, handle)

    def receive_returned_rows(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Transport.receive_returned_rows`."""
        (rows_SD, *weights), _ = self._finish()
        sums_TD = sum_returned_rows(list(rows_SD.split(plan.send_counts)), plan)
        return sums_TD, weights[0] if weights else None

    def _exchange_counts(self, plan: DispatchPlan) -> RecvCounts:
        # The host waits for the counts, since it must allocate for the rows.
        recv_counts_W = torch.empty_like(plan.send_counts_W)
        collectives.all_to_all(
            recv_counts_W, plan.send_counts_W, self.group, kind="counts", layer=plan.layer
        )
        max_rows = self.num_ranks * plan.num_tokens
        return RecvCounts(counts_W=recv_counts_W, max_rows=max_rows)

    def _start(
        self,
        payload: list[Tensor],
        send_counts: list[int],
        recv_counts: list[int],
        handle: DispatchHandle,
    ) -> None:
        assert self._exchange is None, "an exchange is already outstanding"
        outgoing, fields = _pack(payload)
        incoming = outgoing.new_empty(sum(recv_counts), outgoing.shape[1])
        # Padding between the fields counts as metadata.
        row_bytes = {"rows": payload[0].shape[1] * payload[0].itemsize}
        if len(payload) > 1:
            row_bytes["metadata"] = outgoing.shape[1] - row_bytes["rows"]
        work = collectives.all_to_all_start(
            incoming,
            outgoing,
            self.group,
            recv_counts,
            send_counts,
            row_bytes=row_bytes,
            layer=handle.plan.layer,
        )
        self._exchange = _Exchange(work=work, packed=incoming, fields=fields, handle=handle)

    def _finish(self) -> tuple[list[Tensor], DispatchHandle]:
        """The fields of the received rows, after a wait."""
        assert self._exchange is not None, "no exchange is outstanding"
        exchange, self._exchange = self._exchange, None
        exchange.work.wait()
        return [field.of(exchange.packed) for field in exchange.fields], exchange.handle


def _pack(payload: list[Tensor]) -> tuple[Tensor, list[_Field]]:
    """The rows of all tensors side by side, uint8 [rows, bytes], and the places of the tensors."""
    fields: list[_Field] = []
    width = 0
    for tensor in payload:
        fields.append(_Field(start=width, elements=tensor.shape[1], dtype=tensor.dtype))
        width += -(-tensor.shape[1] * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
    # Zeros, since the padding between fields is sent too.
    packed = torch.zeros(len(payload[0]), width, dtype=torch.uint8, device=payload[0].device)
    for tensor, field in zip(payload, fields, strict=True):
        field.of(packed).copy_(tensor)
    return packed, fields
