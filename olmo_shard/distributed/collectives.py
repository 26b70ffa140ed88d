"""Collectives with one interface for gloo, NCCL and every supported torch; their cost is counted.

Gradients are summed, never averaged. A group of one rank communicates nothing and counts nothing.
A function whose name ends in ``_start`` returns at once. Its inputs and outputs must not be touched
before ``wait`` of the returned handle.

[Note: gloo] On gloo, reduce-scatter and all-gather are built from sends and receives. Gloo's own
reduce-scatter moves as many bytes as an all-reduce. Gloo's all-to-all and all-gather reach about
half of a 1 Gbit/s link with 32 MiB messages: 62 and 78 MB/s of 119, which sends and receives reach.
Gloo's all-gather also goes through a temporary buffer as large as its output.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.distributed.comm_stats import comm_stats
from olmo_shard.distributed.long_waits import long_waits
from olmo_shard.distributed.work import AllOf, Work

_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


T = TypeVar("T")


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, *, kind: str) -> None:
    """Sum a tensor over the group, in place.

    :param kind: name under which calls, bytes and waits are counted; so in all functions here.
    """
    if group.size() > 1:
        # A ring sends each element (W - 1) / W times twice.
        comm_stats.add(kind, 2 * _remote_bytes(tensor, group))
        work = dist.all_reduce(tensor, group=group, async_op=True)
        Work(kind, tensor.device, work, group=group).wait()


def reduce_scatter_start(
    output: Tensor,
    flat: Tensor,
    group: dist.ProcessGroup,
    *,
    kind: str,
    wire_dtype: torch.dtype | None = None,
) -> Work:
    """Start to sum over the group in FP32; each rank keeps its slice of the sum.

    :param output: FP32 [n / W]; may be this rank's slice of ``flat``.
    :param flat: FP32 or bf16 [n], n a multiple of the group's size W. Only ``output`` is written.
    :param wire_dtype: type in which values travel; ``None`` means the type of ``flat``. In bf16
        each rank's value is rounded once. A sum is then off by at most 2^-8 x sum_r |value_r|,
        apart from FP32 rounding and from values below the smallest normal number (2^-126).
    """
    if group.size() == 1:
        if output.data_ptr() != flat.data_ptr():
            output.copy_(flat)
        return Work(kind, flat.device)
    outgoing = flat.to(wire_dtype or flat.dtype)
    comm_stats.add(kind, _remote_bytes(outgoing, group))
    if flat.is_cuda and outgoing.dtype == output.dtype:
        work = _reduce_scatter_into(output, outgoing, group=group, async_op=True)
        return Work(kind, flat.device, work, group=group)
    # The wire type differs, or the backend is gloo: exchange the slices, and sum them in `wait`.
    parts = list(outgoing.view(group.size(), -1))
    if flat.is_cuda:
        received = torch.empty_like(outgoing)
        work = dist.all_to_all_single(received, outgoing, group=group, async_op=True)
        incoming = list(received.view(group.size(), -1))
    else:
        buffers = iter(outgoing.new_empty(group.size() - 1, len(parts[0])))
        incoming = [parts[r] if r == group.rank() else next(buffers) for r in range(group.size())]
        work = _exchange(parts, incoming, group)
    return Work(kind, flat.device, work, lambda: _sum_in_rank_order(incoming, output), group=group)


def all_gather_start(flat: Tensor, own: Tensor, group: dist.ProcessGroup, *, kind: str) -> Work:
    """Start to collect the slices of all ranks.

    :param flat: [n], filled with the slices in rank order.
    :param own: [n / W], this rank's slice; may be a view of its place in ``flat``.
    """
    if group.size() == 1:
        if own.data_ptr() != flat.data_ptr():
            flat.copy_(own)
        return Work(kind, flat.device)
    comm_stats.add(kind, _remote_bytes(flat, group))
    if flat.is_cuda:
        work = _all_gather_into(flat, own, group=group, async_op=True)
        return Work(kind, flat.device, work, group=group)
    slices = list(flat.view(group.size(), -1))
    # Sends and receives go between ranks only; this rank's part is a local copy, if any.
    if slices[group.rank()].data_ptr() != own.data_ptr():
        slices[group.rank()].copy_(own)
    work = _exchange([own] * group.size(), slices, group)
    return Work(kind, flat.device, work, group=group)


def all_to_all(
    output: Tensor, flat: Tensor, group: dist.ProcessGroup, *, kind: str, layer: int
) -> None:
    """Exchange slices of equal size along dimension 0, and wait for them.

    :param layer: MoE layer that the slices belong to.
    """
    if group.size() == 1:
        output.copy_(flat)
        return
    comm_stats.add(kind, _remote_bytes(flat, group), layer)
    work = dist.all_to_all_single(output, flat, group=group, async_op=True)
    Work(kind, flat.device, work, layer=layer, group=group).wait()


def all_to_all_start(
    output: Tensor,
    rows: Tensor,
    group: dist.ProcessGroup,
    recv_counts: list[int],
    send_counts: list[int],
    *,
    row_bytes: dict[str, int],
    layer: int,
) -> Work:
    """Start to exchange slices with the given numbers of rows.

    :param recv_counts: rows to receive from each rank.
    :param send_counts: rows to send to each rank.
    :param row_bytes: bytes per row, by kind of payload. The wait is counted for the first kind.
    :param layer: MoE layer that the rows belong to.
    """
    kind = next(iter(row_bytes))
    if group.size() == 1:
        output.copy_(rows)
        return Work(kind, rows.device)
    remote = sum(send_counts) - send_counts[group.rank()]
    for part, num_bytes in row_bytes.items():
        comm_stats.add(part, remote * num_bytes, layer)
    work = dist.all_to_all_single(
        output, rows, recv_counts, send_counts, group=group, async_op=True
    )
    return Work(kind, rows.device, work, layer=layer, group=group)


def _sum_in_rank_order(parts: list[Tensor], output: Tensor) -> None:
    """Add the ranks' parts in a fixed order, in the type of ``output``: equal bits in every run."""
    total = parts[0].to(output.dtype)
    for part in parts[1:-1]:
        total = total + part
    torch.add(total, parts[-1], out=output)


def _exchange(outgoing: list[Tensor], incoming: list[Tensor], group: dist.ProcessGroup) -> AllOf:
    """Send one tensor to each other rank and receive one from each. See [Note: gloo]."""
    tag = next(_tags.setdefault(group, count()))
    size, rank = group.size(), group.rank()
    # Each rank begins with its right neighbour, so the ranks do not all send to rank 0 first.
    peers = [(rank + distance) % size for distance in range(1, size)]
    works = [dist.irecv(incoming[peer], group=group, group_src=peer, tag=tag) for peer in peers]
    works += [dist.isend(outgoing[peer], group=group, group_dst=peer, tag=tag) for peer in peers]
    return AllOf([work for work in works if work is not None])


_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""Tags of each group's exchanges. All ranks make them in one order, so the tags agree."""


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return the values of all ranks, in rank order. Collective; for set-up and errors only.

    :param value: picklable.
    """
    values: list[Any] = [None] * group.size()
    with _watched("exchange of objects", group):
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: T, group: dist.ProcessGroup) -> T:
    """Return the value of the group's first rank, on every rank. Collective.

    :param value: picklable; ignored on other ranks.
    """
    values = [value]
    with _watched("broadcast of an object", group, first_rank_only=True):
        dist.broadcast_object_list(values, group_src=0, group=group)
    return values[0]


def _watched(
    what: str, group: dist.ProcessGroup, *, first_rank_only: bool = False
) -> AbstractContextManager[None]:
    """Report the wait inside if it takes long. The senders are all ranks, or the first alone."""

    def awaited() -> list[int]:
        """The senders' ranks in the world."""
        ranks = dist.get_process_group_ranks(group)
        return ranks[:1] if first_rank_only and group.rank() else ranks

    return long_waits.watch(what, awaited)


def _remote_bytes(tensor: Tensor, group: dist.ProcessGroup) -> int:
    """Bytes of a tensor of W equal slices that belong to other ranks."""
    return tensor.nbytes * (group.size() - 1) // group.size()
