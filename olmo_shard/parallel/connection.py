"""Which transport carries token rows between ranks: the one that the config names, or the best one
that can run here.
"""

from typing import NamedTuple

import torch
from torch import nn

from olmo_shard.config import ParallelConfig
from olmo_shard.dispatch.capacity import most_rows
from olmo_shard.dispatch.collective import CollectiveDispatcher
from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.local import LocalDispatcher
from olmo_shard.dispatch.mailbox import MailboxLayout
from olmo_shard.dispatch.rowwise import RowwiseDispatcher
from olmo_shard.dispatch.rowwise_device import DeviceRowwiseDispatcher
from olmo_shard.distributed.agree import on_every_rank
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import ConfigurationError, HeapError
from olmo_shard.kernels.backend import Backend
from olmo_shard.nn.moe import MoE
from olmo_shard.parallel.gpu_mailbox import check_gpu, gpu_mailbox
from olmo_shard.parallel.host_mailbox import check_host, host_mailbox


class Connection(NamedTuple):
    """How the MoE layers of a model reach their experts."""

    dispatcher: TokenDispatcher
    note: str
    """What was chosen and why, for a log."""


def connect_experts(
    model: nn.Module,
    mesh: Mesh,
    config: ParallelConfig,
    max_tokens: int | None,
    backend: Backend = "reference",
) -> Connection | None:
    """Give every MoE layer its dispatcher; collective over all ranks.

    One dispatcher for all layers: it asserts that at most one exchange is outstanding in the model.

    :param max_tokens: of a rank's largest micro-batch; sizes the mailboxes of ``rowwise``.
    :param backend: what computes routed experts.
    :returns: null for a model without MoE layers.
    :raises ConfigurationError: where the transport that the config names cannot run here.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        return None
    connection = _connect(layers[0], mesh, config, max_tokens, backend)
    for layer in layers:
        layer.dispatcher, layer.experts.backend = connection.dispatcher, backend
    return connection


def _connect(
    layer: MoE, mesh: Mesh, config: ParallelConfig, max_tokens: int | None, backend: Backend
) -> Connection:
    num_experts, factor = layer.router.num_experts, config.capacity_factor
    if config.dispatch == "local" or (config.dispatch == "auto" and mesh.expert_parallel == 1):
        return Connection(LocalDispatcher(num_experts, factor, backend), _note("local", config))
    note = _note("collective", config)
    if config.dispatch != "collective":
        try:
            return _rowwise(layer, mesh, config, max_tokens, backend)
        except HeapError as error:
            if config.dispatch == "rowwise":
                raise refusal(error) from error
            note += f": rowwise cannot run here: {error}"
    return Connection(CollectiveDispatcher(num_experts, mesh.ep, factor, backend), note)


def refusal(error: HeapError) -> ConfigurationError:
    """For ``parallel.dispatch: rowwise`` where it cannot run."""
    return ConfigurationError(
        f"parallel.dispatch = rowwise cannot run here: {error}; use collective, or auto, which "
        "takes what can run"
    )


def _note(name: str, config: ParallelConfig) -> str:
    return f"{name} (parallel.dispatch = {config.dispatch})"


def _rowwise(
    layer: MoE, mesh: Mesh, config: ParallelConfig, max_tokens: int | None, backend: Backend
) -> Connection:
    """:raises HeapError: on all ranks, with the reason of the first that has one."""

    def layout_here() -> MailboxLayout:
        check_rowwise_here(mesh.device.type, backend, config)
        return _layout(layer, config, max_tokens)

    layout = on_every_rank(mesh.control, layout_here)
    assert max_tokens is not None
    num_experts, factor = layer.router.num_experts, config.capacity_factor
    if mesh.device.type == "cpu":
        mailbox, said = host_mailbox(mesh, layout)
        dispatcher = RowwiseDispatcher(num_experts, mailbox, max_tokens, factor)
    else:
        mailbox, said = gpu_mailbox(mesh, layout, config)
        dispatcher = DeviceRowwiseDispatcher(num_experts, mailbox, max_tokens, factor)
    return Connection(dispatcher, f"{_note('rowwise', config)}: {layout.describe()}; {said}")


def check_rowwise_here(device_type: str, backend: Backend, config: ParallelConfig) -> None:
    """:raises HeapError: where this machine cannot run ``rowwise``, whatever the model."""
    if device_type == "cpu":
        if config.symmetric_heap != "auto":
            raise HeapError(
                f"parallel.symmetric_heap = {config.symmetric_heap} is memory of GPUs, this is a "
                "run on cpu"
            )
        check_host()
    else:
        check_gpu(backend)


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


def _layout(layer: MoE, config: ParallelConfig, max_tokens: int | None) -> MailboxLayout:
    if max_tokens is None:
        raise HeapError("parallelize was not told max_tokens, by which mailboxes are sized")
    router = layer.router
    width = router.gate.in_features
    return mailbox_layout(router.num_experts, router.top_k, width, config, max_tokens)
