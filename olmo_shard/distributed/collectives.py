"""The collectives in one spelling for gloo and NCCL and for every supported torch, with their cost
counted.

Gradients are always summed, never averaged. A group of one communicates nothing and counts nothing.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


T = TypeVar("T")


@dataclass
class Traffic:
    """Calls and bytes that this process sent, by kind of collective."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, num_bytes: int) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += num_bytes


traffic = Traffic()
"""Totals since the process started; take differences to measure a step."""


class Work:
    """A collective under way (nothing to wait for in a group of one)."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, *, kind: str) -> None:
    """Sum over the group, in place."""
    if group.size() > 1:
        # A ring sends each element (W - 1) / W times twice.
        traffic.add(kind, 2 * _remote_bytes(tensor, group))
        dist.all_reduce(tensor, group=group)


def reduce_scatter(output: Tensor, flat: Tensor, group: dist.ProcessGroup, *, kind: str) -> None:
    """Sum over the group and keep this rank's slice.

    :param output: [n / W], may be the own slice of ``flat``.
    :param flat: [n], n a multiple of the group's size W; unchanged but for ``output``.
    """
    if group.size() == 1:
        if output.data_ptr() != flat.data_ptr():
            output.copy_(flat)
        return
    traffic.add(kind, _remote_bytes(flat, group))
    if flat.is_cuda:
        _reduce_scatter_into(output, flat, group=group)
        return
    # Gloo's own moves as many bytes as an all-reduce. All slices of one rank, added in rank order:
    # half the bytes, and the same bits each time.
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    torch.sum(received.view(group.size(), -1), dim=0, out=output)


def all_gather(flat: Tensor, own: Tensor, group: dist.ProcessGroup, *, kind: str) -> None:
    """Fill ``flat`` [n] with the slices ``own`` [n / W] of all ranks; it may be a view of it."""
    if group.size() == 1:
        if own.data_ptr() != flat.data_ptr():
            flat.copy_(own)
        return
    traffic.add(kind, _remote_bytes(flat, group))
    _all_gather_into(flat, own, group=group)


def all_to_all(output: Tensor, flat: Tensor, group: dist.ProcessGroup, *, kind: str) -> None:
    """Exchange equal slices along dimension 0."""
    if group.size() == 1:
        output.copy_(flat)
        return
    traffic.add(kind, _remote_bytes(flat, group))
    dist.all_to_all_single(output, flat, group=group)


def all_to_all_start(
    output: Tensor,
    rows: Tensor,
    group: dist.ProcessGroup,
    recv_counts: list[int],
    send_counts: list[int],
    *,
    kind: str,
) -> Work:
    """Start to exchange slices of the given numbers of rows; wait before using ``output``."""
    if group.size() == 1:
        output.copy_(rows)
        return Work(None)
    remote = sum(send_counts) - send_counts[group.rank()]
    traffic.add(kind, remote * rows[:1].nbytes if remote else 0)
    return Work(
        dist.all_to_all_single(output, rows, recv_counts, send_counts, group=group, async_op=True)
    )


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
