"""The mailboxes of ``rowwise`` on CPUs: in the shared memory of one host."""

import math
from collections import defaultdict
from typing import NamedTuple

from olmo_shard.dispatch.heap.shared_memory import SharedMemoryHeap, unsupported
from olmo_shard.dispatch.mailbox import Mailbox, MailboxLayout
from olmo_shard.distributed.agree import on_every_rank
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.host_identity import host_identity
from olmo_shard.distributed.host_memory import available_memory, format_bytes
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import HeapError
from olmo_shard.parallel.made_on_all import made_on_all


def check_host() -> None:
    """:raises HeapError: where this machine cannot have such mailboxes, whatever the model."""
    if problem := unsupported():
        raise HeapError(problem)


def host_mailbox(mesh: Mesh, layout: MailboxLayout) -> tuple[Mailbox, str]:
    """This rank's, and what to say of it; collective.

    :raises HeapError: on all ranks, where one of them cannot have it.
    """
    available = _check_hosts(mesh, layout)
    heap = made_on_all(
        mesh,
        lambda: SharedMemoryHeap(mesh.ep, layout.arena_bytes, layout.num_flags, mesh.timeout),
    )
    return Mailbox(heap, layout), f"{format_bytes(available)} available"


class _Place(NamedTuple):
    """Where a rank runs."""

    host: tuple[str, int]
    """Equal on ranks that can share memory."""
    ep_group: int
    available: int
    """Bytes."""


def _place(ep_group: int) -> _Place:
    try:
        return _Place(host_identity(), ep_group, available_memory())
    except OSError as error:
        raise HeapError(f"cannot read {error.filename}: {error.strerror}") from error


def _check_hosts(mesh: Mesh, layout: MailboxLayout) -> int:
    """Bytes that are available on the host that has least; collective.

    :raises HeapError: where the ranks of a group cannot share memory, or a host has too little.
    """
    ep_group = mesh.rank // mesh.expert_parallel
    own = on_every_rank(mesh.control, lambda: _place(ep_group))
    hosts_of_group: dict[int, set[tuple[str, int]]] = defaultdict(set)
    ranks_of_host: dict[tuple[str, int], list[int]] = defaultdict(list)
    places = gather_objects(own, mesh.control)
    for rank, place in enumerate(places):
        hosts_of_group[place.ep_group].add(place.host)
        ranks_of_host[place.host].append(rank)
    for group, hosts in hosts_of_group.items():
        if len(hosts) > 1:
            first = group * mesh.expert_parallel
            raise HeapError(
                f"ranks {first} to {first + mesh.expert_parallel - 1} do not share a host and a "
                "process namespace"
            )
    least = math.inf
    for ranks in ranks_of_host.values():
        available = min(places[rank].available for rank in ranks)
        check_memory(layout, len(ranks), available)
        least = min(least, available)
    return int(least)


def check_memory(layout: MailboxLayout, num_ranks: int, available: int) -> None:
    """:raises HeapError: where the mailboxes of a host's ranks need more than there is."""
    needed = layout.arena_bytes * num_ranks
    if needed > available:
        raise HeapError(
            f"the mailboxes of {num_ranks} rank(s) need {format_bytes(needed)} of shared memory, "
            f"{format_bytes(available)} are available; {layout.describe()}: lower "
            "train.micro_batch_tokens, or set parallel.capacity_factor"
        )
