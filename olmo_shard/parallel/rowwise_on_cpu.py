"""Rowwise dispatch on CPUs as a candidate: mailboxes in the shared memory of one host."""

import math
from collections import defaultdict
from typing import NamedTuple

from olmo_shard.dispatch.heap.shared_memory import SharedMemoryHeap, unsupported
from olmo_shard.dispatch.mailbox.mailbox_cpu import CpuMailbox
from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout
from olmo_shard.dispatch.rowwise.rowwise_cpu import RowwiseCpuTransport
from olmo_shard.dispatch.transport import Transport
from olmo_shard.distributed.agree import on_every_rank
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.host_identity import host_identity
from olmo_shard.distributed.host_memory import available_memory, format_bytes
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import HeapError
from olmo_shard.parallel.create_on_every_rank import create_on_every_rank
from olmo_shard.parallel.transport_candidate import (
    DispatchRequest,
    TransportCandidate,
    max_tokens_problem,
)


class RowwiseOnCpu(TransportCandidate):
    """Rows are copied into mailboxes of ranks on the same host."""

    name = "rowwise"

    def applies_to(self, request: DispatchRequest) -> bool:
        """See :meth:`TransportCandidate.applies_to`."""
        return request.device_type == "cpu"

    def problem(self, request: DispatchRequest, ranks_on_host: int | None = None) -> str | None:
        """See :meth:`TransportCandidate.problem`."""
        heap = request.parallel.symmetric_heap
        if heap != "auto":
            return f"parallel.symmetric_heap = {heap} is memory of GPUs, this is a run on cpu"
        problem = unsupported() or max_tokens_problem(request)
        if problem is None and ranks_on_host is not None:
            layout = request.mailbox_layout()
            problem = _memory_problem(layout, ranks_on_host, available_memory())
        return problem

    def describe(self, request: DispatchRequest, ranks_on_host: int) -> str:
        """See :meth:`TransportCandidate.describe`."""
        layout = request.mailbox_layout()
        return (
            f"rowwise if all ranks of a group are on one host: {layout.describe()}, "
            f"{format_bytes(layout.arena_bytes * ranks_on_host)} for {ranks_on_host} rank(s); "
            f"{format_bytes(available_memory())} available here"
        )

    def create(self, request: DispatchRequest, mesh: Mesh) -> tuple[Transport, str]:
        """See :meth:`TransportCandidate.create`."""
        layout = request.mailbox_layout()
        available = _check_hosts(mesh, layout)
        heap = create_on_every_rank(
            mesh,
            lambda: SharedMemoryHeap(mesh.ep, layout.arena_bytes, layout.num_flags, mesh.timeout),
        )
        assert request.max_tokens is not None
        transport = RowwiseCpuTransport(CpuMailbox(heap, layout), request.max_tokens)
        return transport, f"{layout.describe()}; {format_bytes(available)} available"


class _Place(NamedTuple):
    """Where a rank runs."""

    host: tuple[str, int]
    """Equal on ranks that can share memory."""
    ep_group: int
    """Number of the rank's expert-parallel group."""
    available: int
    """Available memory in bytes, as the rank sees it."""


def _place(ep_group: int) -> _Place:
    try:
        return _Place(host_identity(), ep_group, available_memory())
    except OSError as error:
        raise HeapError(f"cannot read {error.filename}: {error.strerror}") from error


def _check_hosts(mesh: Mesh, layout: MailboxLayout) -> int:
    """Bytes that are available on the host with the least memory; collective.

    :raises HeapError: on all ranks, if the ranks of a group cannot share memory, or if a host has
        too little.
    """
    # Every rank sees the places of all ranks, and so comes to the same result.
    ep_group = mesh.rank // mesh.expert_parallel
    own_place = on_every_rank(mesh.control, lambda: _place(ep_group))
    places = gather_objects(own_place, mesh.control)
    hosts_of_group: dict[int, set[tuple[str, int]]] = defaultdict(set)
    ranks_of_host: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        hosts_of_group[place.ep_group].add(place.host)
        ranks_of_host[place.host].append(rank)
    # A group shares memory, so it must be on one host.
    for group, hosts in hosts_of_group.items():
        if len(hosts) > 1:
            first = group * mesh.expert_parallel
            raise HeapError(
                f"ranks {first} to {first + mesh.expert_parallel - 1} do not share a host and a "
                "process namespace"
            )
    # A host may hold several groups, whose mailboxes add up.
    least = math.inf
    for ranks in ranks_of_host.values():
        available = min(places[rank].available for rank in ranks)
        if problem := _memory_problem(layout, len(ranks), available):
            raise HeapError(problem)
        least = min(least, available)
    return int(least)


def _memory_problem(layout: MailboxLayout, num_ranks: int, available: int) -> str | None:
    """Why the mailboxes of a host's ranks do not fit its memory; ``None`` if they do."""
    needed = layout.arena_bytes * num_ranks
    if needed <= available:
        return None
    return (
        f"the mailboxes of {num_ranks} rank(s) need {format_bytes(needed)} of shared memory, "
        f"{format_bytes(available)} are available; {layout.describe()}: lower "
        "train.micro_batch_tokens, or set parallel.capacity_factor"
    )
