"""Rows travel by all-to-all, on gloo or NCCL: the reference transport, and the way across hosts."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.exchange import DispatchHandle, Received, RecvCounts, on_host
from olmo_shard.dispatch.plan import DispatchPlan
from olmo_shard.dispatch.sum_rows import sum_rows
from olmo_shard.distributed import collectives
from olmo_shard.distributed.work import Work
from olmo_shard.kernels.backend import Backend

_ALIGN = 8
"""Bytes: every field of a packed row starts on a multiple, to be viewed in its own type."""


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    work: Work
    packed: Tensor
    fields: list[tuple[int, int, torch.dtype]]
    """Of each payload tensor: first byte in the row, elements, type."""
    counts: list[int]
    """Rows from each rank."""


class CollectiveDispatcher(TokenDispatcher):
    """One variable all-to-all an exchange; the tensors of a payload are packed row by row.

    :param group: the expert-parallel process group.
    """

    name = "collective"

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        capacity_factor: float | None = None,
        backend: Backend = "reference",
    ) -> None:
        super().__init__(num_experts, group.rank(), group.size(), capacity_factor, backend)
        self.group = group
        self._in_flight: _InFlight | None = None

    def push(
        self,
        x_TD: Tensor,
        plan: DispatchPlan,
        topk_weights_TK: Tensor | None = None,
        recv_counts: RecvCounts | None = None,
    ) -> None:
        payload = [x_TD[plan.token_S]]
        if topk_weights_TK is not None:
            payload += [plan.weights_by_slot(topk_weights_TK), plan.local_expert_Sm]
        counts = self._exchange_counts(plan) if recv_counts is None else on_host(recv_counts)
        self._send(payload, plan.send_counts, counts, plan.layer)

    def pull(self) -> Received:
        (rows_RD, *metadata), counts = self._receive()
        weights_Rm, local_expert_Rm = metadata or (None, None)
        most = 0 if local_expert_Rm is None else self._most_pairs(local_expert_Rm)
        return Received(rows_RD, weights_Rm, local_expert_Rm, most, counts)

    def _most_pairs(self, local_expert_Rm: Tensor) -> int:
        """Exact for Triton, which allocates for them; its reference counts for itself."""
        if self.backend == "triton":
            return int((local_expert_Rm >= 0).sum())
        return local_expert_Rm.numel()

    def push_back(
        self, rows_RD: Tensor, handle: DispatchHandle, weights_Rm: Tensor | None = None
    ) -> None:
        payload = [rows_RD] if weights_Rm is None else [rows_RD, weights_Rm]
        plan = handle.plan
        self._send(payload, on_host(handle.recv_counts), plan.send_counts, plan.layer)

    def pull_back(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        (rows_SD, *weights), counts = self._receive()
        return sum_rows(list(rows_SD.split(counts)), plan), weights[0] if weights else None

    def _exchange_counts(self, plan: DispatchPlan) -> list[int]:
        recv_counts_W = torch.empty_like(plan.send_counts_W)
        collectives.all_to_all(
            recv_counts_W, plan.send_counts_W, self.group, kind="counts", layer=plan.layer
        )
        return recv_counts_W.tolist()

    def _send(
        self, payload: list[Tensor], send_counts: list[int], recv_counts: list[int], layer: int
    ) -> None:
        assert self._in_flight is None, "an exchange is already outstanding"
        outgoing, fields = _pack(payload)
        incoming = outgoing.new_empty(sum(recv_counts), outgoing.shape[1])
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
            layer=layer,
        )
        self._in_flight = _InFlight(work=work, packed=incoming, fields=fields, counts=recv_counts)

    def _receive(self) -> tuple[list[Tensor], list[int]]:
        assert self._in_flight is not None, "no exchange is outstanding"
        flight, self._in_flight = self._in_flight, None
        flight.work.wait()
        return [_field(flight.packed, *field) for field in flight.fields], flight.counts


def _pack(payload: list[Tensor]) -> tuple[Tensor, list[tuple[int, int, torch.dtype]]]:
    fields: list[tuple[int, int, torch.dtype]] = []
    width = 0
    for tensor in payload:
        fields.append((width, tensor.shape[1], tensor.dtype))
        width += -(-tensor.shape[1] * tensor.itemsize // _ALIGN) * _ALIGN
    # Zeros, since the padding between fields is sent too.
    packed = torch.zeros(len(payload[0]), width, dtype=torch.uint8, device=payload[0].device)
    for tensor, field in zip(payload, fields, strict=True):
        _field(packed, *field).copy_(tensor)
    return packed, fields


def _field(packed: Tensor, start: int, elements: int, dtype: torch.dtype) -> Tensor:
    return packed[:, start : start + elements * dtype.itemsize].view(dtype)
