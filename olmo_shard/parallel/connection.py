"""Which transport carries token rows between ranks: the one that the config names, or the best one
that can run here.
"""

import math
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import nn

from olmo_shard.config import ParallelConfig
from olmo_shard.dispatch.capacity import most_rows
from olmo_shard.dispatch.collective import CollectiveDispatcher
from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.heap.shared_memory import SharedMemoryHeap, host_identity, unsupported
from olmo_shard.dispatch.local import LocalDispatcher
from olmo_shard.dispatch.mailbox import Mailbox, MailboxLayout
from olmo_shard.dispatch.rowwise import RowwiseDispatcher
from olmo_shard.distributed.agree import on_every_rank
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.host_memory import available_memory, in_units
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import ConfigurationError, HeapError
from olmo_shard.nn.moe import MoE


class Connection(NamedTuple):
    """How the MoE layers of a model reach their experts."""

    dispatcher: TokenDispatcher
    note: str
    """What was chosen and why, for a log."""


def connect_experts(
    model: nn.Module, mesh: Mesh, config: ParallelConfig, max_tokens: int | None
) -> Connection | None:
    """Give every MoE layer its dispatcher; collective over all ranks.

    One dispatcher for all layers: it asserts that at most one exchange is outstanding in the model.

    :param max_tokens: of a rank's largest micro-batch; sizes the mailboxes of ``rowwise``.
    :returns: null for a model without MoE layers.
    :raises ConfigurationError: where the transport that the config names cannot run here.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        return None
    connection = _connect(layers[0], mesh, config, max_tokens)
    for layer in layers:
        layer.dispatcher = connection.dispatcher
    return connection


def _connect(layer: MoE, mesh: Mesh, config: ParallelConfig, max_tokens: int | None) -> Connection:
    num_experts, factor = layer.router.num_experts, config.capacity_factor
    if config.dispatch == "local" or (config.dispatch == "auto" and mesh.expert_parallel == 1):
        return Connection(LocalDispatcher(num_experts, factor), _note("local", config))
    note = _note("collective", config)
    if config.dispatch != "collective":
        try:
            return _rowwise(layer, mesh, config, max_tokens)
        except HeapError as error:
            if config.dispatch == "rowwise":
                raise refusal(error) from error
            note += f": rowwise cannot run here: {error}"
    return Connection(CollectiveDispatcher(num_experts, mesh.ep, factor), note)


def refusal(error: HeapError) -> ConfigurationError:
    """For ``parallel.dispatch: rowwise`` where it cannot run."""
    return ConfigurationError(
        f"parallel.dispatch = rowwise cannot run here: {error}; use collective, or auto, which "
        "takes what can run"
    )


def _note(name: str, config: ParallelConfig) -> str:
    return f"{name} (parallel.dispatch = {config.dispatch})"


def _rowwise(layer: MoE, mesh: Mesh, config: ParallelConfig, max_tokens: int | None) -> Connection:
    """:raises HeapError: on all ranks, with the reason of the first that has one."""
    layout = on_every_rank(mesh.control, lambda: _layout_here(layer, mesh, config, max_tokens))
    available = _check_hosts(mesh, layout)
    heap = _heap(mesh, layout)
    assert max_tokens is not None
    dispatcher = RowwiseDispatcher(
        layer.router.num_experts, Mailbox(heap, layout), max_tokens, config.capacity_factor
    )
    note = f"{_note('rowwise', config)}: {layout.describe()}; {in_units(available)} available"
    return Connection(dispatcher, note)


def check_rowwise_here(device_type: str) -> None:
    """:raises HeapError: where this machine cannot run ``rowwise``, whatever the model."""
    if device_type != "cpu":
        raise HeapError(f"its shared memory is for CPUs, this is a run on {device_type}")
    if problem := unsupported():
        raise HeapError(problem)


def mailbox_layout(
    num_experts: int, top_k: int, width: int, config: ParallelConfig, max_tokens: int
) -> MailboxLayout:
    """The mailboxes of a model's MoE layers.

    :param max_tokens: of a rank's micro-batch.
    """
    ranks = config.expert_parallel
    return MailboxLayout(
        num_ranks=ranks,
        max_rows=most_rows(max_tokens, top_k, num_experts, ranks, config.capacity_factor),
        num_slots=min(top_k, num_experts // ranks),
        width=width,
        dtype=getattr(torch, config.compute_dtype),
    )


def _layout_here(
    layer: MoE, mesh: Mesh, config: ParallelConfig, max_tokens: int | None
) -> MailboxLayout:
    check_rowwise_here(mesh.device.type)
    if max_tokens is None:
        raise HeapError("parallelize was not told max_tokens, by which mailboxes are sized")
    router = layer.router
    width = router.gate.in_features
    return mailbox_layout(router.num_experts, router.top_k, width, config, max_tokens)


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
            f"the mailboxes of {num_ranks} rank(s) need {in_units(needed)} of shared memory, "
            f"{in_units(available)} are available; {layout.describe()}: lower "
            "train.micro_batch_tokens, or set parallel.capacity_factor"
        )


def _heap(mesh: Mesh, layout: MailboxLayout) -> SharedMemoryHeap:
    """Made on all ranks, or on none."""
    heap: SharedMemoryHeap | None = None
    problem: str | None = None
    try:
        heap = SharedMemoryHeap(mesh.ep, layout.arena_bytes, layout.num_flags, mesh.timeout)
    except HeapError as error:
        problem = str(error)
    problems = [other for other in gather_objects(problem, mesh.control) if other is not None]
    if problems:
        if heap is not None:
            heap.close()
        raise HeapError(problems[0])
    assert heap is not None
    return heap
