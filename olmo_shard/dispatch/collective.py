"""Rows travel by all-to-all, on gloo or NCCL: the reference transport, and the way across hosts."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.exchange import DispatchHandle
from olmo_shard.distributed import collectives
from olmo_shard.distributed.work import Work

_ALIGN = 8
"""Bytes: every field of a packed row starts on a multiple, to be viewed in its own type."""


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    work: Work
    packed: Tensor
    fields: list[tuple[int, int, torch.dtype]]
    """Of each payload tensor: first byte in the row, elements, type."""


class CollectiveDispatcher(TokenDispatcher):
    """One variable all-to-all an exchange; the tensors of a payload are packed row by row.

    :param group: the expert-parallel process group.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        super().__init__(num_experts, num_ranks=group.size())
        self.group = group
        self._in_flight: _InFlight | None = None

    def exchange_counts(self, send_counts_W: Tensor) -> Tensor:
        recv_counts_W = torch.empty_like(send_counts_W)
        collectives.all_to_all(recv_counts_W, send_counts_W, self.group, kind="counts")
        return recv_counts_W

    def send(self, payload: tuple[Tensor, ...], handle: DispatchHandle, outward: bool) -> None:
        assert self._in_flight is None, "an exchange is already outstanding"
        send_counts, recv_counts = handle.send_counts, handle.recv_counts
        if not outward:
            send_counts, recv_counts = recv_counts, send_counts
        outgoing, fields = _pack(payload)
        incoming = outgoing.new_empty(sum(recv_counts), outgoing.shape[1])
        work = collectives.all_to_all_start(
            incoming, outgoing, self.group, recv_counts, send_counts, kind="rows"
        )
        self._in_flight = _InFlight(work=work, packed=incoming, fields=fields)

    def receive(self) -> tuple[Tensor, ...]:
        assert self._in_flight is not None, "no exchange is outstanding"
        flight, self._in_flight = self._in_flight, None
        flight.work.wait()
        return tuple(_field(flight.packed, *field) for field in flight.fields)


def _pack(payload: tuple[Tensor, ...]) -> tuple[Tensor, list[tuple[int, int, torch.dtype]]]:
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
