"""The collectives in one spelling for gloo and NCCL and for every supported torch, with their cost
counted.

Gradients are always summed, never averaged. A group of one communicates nothing and counts nothing.
What ends in ``_start`` returns at once: neither inputs nor outputs may be touched before its
``wait``.

[Note: gloo] Reduce-scatter and all-gather are built from sends and receives there. Gloo's own
reduce-scatter moves as many bytes as an all-reduce; its all-to-all and all-gather use about half of
a 1 Gbit/s link in 32 MiB messages (62 and 78 of 119 MB/s; sends and receives 119), and the latter
goes through a temporary buffer as large as its output.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.distributed.comm_stats import comm_stats
from olmo_shard.distributed.work import AllOf, Work

_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


T = TypeVar("T")


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, *, kind: str) -> None:
    """Sum over the group, in place."""
    if group.size() > 1:
        # A ring sends each element (W - 1) / W times twice.
        comm_stats.add(kind, 2 * _remote_bytes(tensor, group))
        Work(kind, tensor.device, dist.all_reduce(tensor, group=group, async_op=True)).wait()


def reduce_scatter_start(
    output: Tensor,
    flat: Tensor,
    group: dist.ProcessGroup,
    *,
    kind: str,
    wire_dtype: torch.dtype | None = None,
) -> Work:
    """Start to sum over the group in FP32 and keep this rank's slice.

    :param output: FP32 [n / W], may be the own slice of ``flat``.
    :param flat: FP32 or bf16 [n], n a multiple of the group's size W; unchanged but for ``output``.
    :param wire_dtype: type in which values travel; null: the type of ``flat``. In bf16 each rank's
        value is rounded once, so a sum is off by at most 2^-8 x sum_r |value_r|, FP32 rounding and
        values below the smallest normal number (2^-126) apart.
    """
    if group.size() == 1:
        if output.data_ptr() != flat.data_ptr():
            output.copy_(flat)
        return Work(kind, flat.device)
    outgoing = flat.to(wire_dtype or flat.dtype)
    comm_stats.add(kind, _remote_bytes(outgoing, group))
    if flat.is_cuda and outgoing.dtype == output.dtype:
        work = _reduce_scatter_into(output, outgoing, group=group, async_op=True)
        return Work(kind, flat.device, work)
    parts = list(outgoing.view(group.size(), -1))
    if flat.is_cuda:
        received = torch.empty_like(outgoing)
        work = dist.all_to_all_single(received, outgoing, group=group, async_op=True)
        incoming = list(received.view(group.size(), -1))
    else:
        others = iter(outgoing.new_empty(group.size() - 1, len(parts[0])))
        incoming = [parts[r] if r == group.rank() else next(others) for r in range(group.size())]
        work = _exchange(parts, incoming, group)
    return Work(kind, flat.device, work, lambda: _sum_in_rank_order(incoming, output))


def all_gather_start(flat: Tensor, own: Tensor, group: dist.ProcessGroup, *, kind: str) -> Work:
    """Start to fill ``flat`` [n] with the slices ``own`` [n / W] of all ranks.

    :param own: may be this rank's slice of ``flat``.
    """
    if group.size() == 1:
        if own.data_ptr() != flat.data_ptr():
            flat.copy_(own)
        return Work(kind, flat.device)
    comm_stats.add(kind, _remote_bytes(flat, group))
    if flat.is_cuda:
        work = _all_gather_into(flat, own, group=group, async_op=True)
        return Work(kind, flat.device, work)
    slots = list(flat.view(group.size(), -1))
    if slots[group.rank()].data_ptr() != own.data_ptr():
        slots[group.rank()].copy_(own)
    return Work(kind, flat.device, _exchange([own] * group.size(), slots, group))


def all_to_all(
    output: Tensor, flat: Tensor, group: dist.ProcessGroup, *, kind: str, layer: int
) -> None:
    """Exchange equal slices along dimension 0.

    :param layer: of the model, to which they belong.
    """
    if group.size() == 1:
        output.copy_(flat)
        return
    comm_stats.add(kind, _remote_bytes(flat, group), layer)
    work = dist.all_to_all_single(output, flat, group=group, async_op=True)
    Work(kind, flat.device, work, layer=layer).wait()


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
    """Start to exchange slices of the given numbers of rows.

    :param row_bytes: what a row carries, by kind; waiting counts for the first.
    :param layer: of the model, to which they belong.
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
    return Work(kind, rows.device, work, layer=layer)


def _sum_in_rank_order(parts: list[Tensor], output: Tensor) -> None:
    """The same bits each time, in FP32 whatever the type in which the parts came."""
    total = parts[0].to(output.dtype)
    for part in parts[1:-1]:
        total = total + part
    torch.add(total, parts[-1], out=output)


def _exchange(outgoing: list[Tensor], incoming: list[Tensor], group: dist.ProcessGroup) -> AllOf:
    """Send a tensor to each other rank and receive one from each. See [Note: gloo]."""
    tag = next(_tags.setdefault(group, count()))
    size, rank = group.size(), group.rank()
    # Staggered, so that not all ranks send to the same one first.
    others = [(rank + distance) % size for distance in range(1, size)]
    works = [dist.irecv(incoming[peer], group=group, group_src=peer, tag=tag) for peer in others]
    works += [dist.isend(outgoing[peer], group=group, group_dst=peer, tag=tag) for peer in others]
    return AllOf([work for work in works if work is not None])


_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""Of each group's exchanges: every rank makes them in the same order."""


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """The picklable ``value`` of every rank, on every rank. For set-up and errors alone."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: T, group: dist.ProcessGroup) -> T:
    """The picklable ``value`` of the group's first rank, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, group_src=0, group=group)
    return values[0]


def _remote_bytes(tensor: Tensor, group: dist.ProcessGroup) -> int:
    return tensor.nbytes * (group.size() - 1) // group.size()
