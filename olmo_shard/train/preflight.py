"""What a config comes to on this machine: device, implementation of kernels, and dispatch."""

import torch

from olmo_shard.config import Config
from olmo_shard.dispatch.mailbox import MailboxLayout
from olmo_shard.distributed.host_memory import available_memory, format_bytes
from olmo_shard.errors import HeapError
from olmo_shard.kernels.backend import Backend, choose_backend
from olmo_shard.parallel.connection import check_rowwise_here, mailbox_layout, refusal
from olmo_shard.parallel.gpu_mailbox import check_gpu_memory
from olmo_shard.parallel.host_mailbox import check_memory


def check_dispatch(config: Config, num_ranks: int) -> str:
    """How token rows would travel on this host.

    :param num_ranks: that share its memory; the ranks of one expert-parallel group at least.
    :raises ConfigurationError: where the config names a way that is not open here.
    """
    parallel, moe = config.parallel, config.model.moe
    ranks = parallel.expert_parallel
    if moe is None or parallel.dispatch in ("local", "collective"):
        return parallel.dispatch if moe is not None else "none: no experts"
    if parallel.dispatch == "auto" and ranks == 1:
        return "local"
    tokens = config.train.micro_batch_tokens
    layout = mailbox_layout(moe.num_experts, moe.top_k, config.model.d_model, parallel, tokens)
    try:
        check_rowwise_here(device_type(config), kernels_of(config), parallel)
        if device_type(config) == "cuda":
            check_gpu_memory(layout, parallel)
            return f"rowwise where the GPUs of a group reach each other: {layout.describe()}"
        return _in_shared_memory(layout, num_ranks)
    except HeapError as error:
        if parallel.dispatch == "rowwise":
            raise refusal(error) from error
        return f"collective: rowwise cannot run here: {error}"


def _in_shared_memory(layout: MailboxLayout, num_ranks: int) -> str:
    """:raises HeapError: where there is too little."""
    available = available_memory()
    check_memory(layout, num_ranks, available)
    return (
        f"rowwise where all ranks of a group are on one host: {layout.describe()}, "
        f"{format_bytes(layout.arena_bytes * num_ranks)} for {num_ranks} rank(s); "
        f"{format_bytes(available)} available here"
    )


def device_type(config: Config) -> str:
    """Return the device type of the run on this machine: ``cpu`` or ``cuda``."""
    if config.run.device != "auto":
        return config.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def kernels_of(config: Config) -> Backend:
    """Return the implementation of kernels that ``parallel.kernels`` means on this machine.

    :raises ConfigurationError: if it cannot run here.
    """
    return choose_backend(config.parallel.kernels, device_type(config))
