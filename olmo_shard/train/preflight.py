"""What a config comes to on this machine: device, implementation of kernels, and dispatch."""

import torch

from olmo_shard.config import Config
from olmo_shard.kernels.backend import Backend, choose_backend
from olmo_shard.nn.families import meta_model
from olmo_shard.optim.parameter_groups import ParameterGroup, group_parameters
from olmo_shard.parallel.dispatchers import describe_dispatcher
from olmo_shard.parallel.transport_candidate import DispatchRequest


def check_dispatch(config: Config, num_ranks: int) -> str:
    """How token rows would travel on this host.

    :param num_ranks: ranks that share its memory; the ranks of one expert-parallel group at least.
    :raises ConfigurationError: if the transport that the config names cannot run here.
    """
    moe = config.model.moe
    if moe is None:
        return "none: no experts"
    request = DispatchRequest(
        parallel=config.parallel,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        width=config.model.d_model,
        max_tokens=config.train.micro_batch_tokens,
        device_type=device_type(config),
        backend=kernels_of(config),
    )
    return describe_dispatcher(request, num_ranks)


def parameter_groups(config: Config) -> list[ParameterGroup]:
    """Return the parameter groups of the run's model by ``optim.groups``.

    :raises ConfigurationError: if a pattern matches no parameter, or a group gets none.
    """
    parameters = meta_model(config.model).named_parameters()
    sizes = {name: parameter.numel() for name, parameter in parameters}
    return group_parameters(sizes, config.optim)


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
