"""Everything that makes a single-device model parallel, in one order."""

import torch
from torch import Tensor, nn

from olmo_shard.config import ParallelConfig
from olmo_shard.config.layout import experts_problem
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import ConfigurationError
from olmo_shard.kernels.backend import choose_backend
from olmo_shard.nn.feed_forward import FeedForward
from olmo_shard.nn.init import initial_tensor
from olmo_shard.nn.recompute import checkpointed
from olmo_shard.nn.transformer import Block, Transformer
from olmo_shard.parallel.connection import connect_experts
from olmo_shard.parallel.ddp import DDPModel
from olmo_shard.parallel.expert import shard_experts
from olmo_shard.parallel.fsdp import FSDPModel
from olmo_shard.parallel.shards import LogicalParameter, ParallelModel


def parallelize(
    model: Transformer,
    mesh: Mesh,
    config: ParallelConfig,
    seed: int = 0,
    max_tokens: int | None = None,
) -> ParallelModel:
    """Spread a model over the ranks of a mesh, and draw its weights; collective over all ranks.

    :param model: built on the meta device. A rank draws no routed experts but its own.
    :param mesh: made with the same ``expert_parallel`` as the config's.
    :param seed: of the initial weights.
    :param max_tokens: of a rank's largest micro-batch, evaluation included. ``dispatch: rowwise``
        sizes its mailboxes by it; without it ``auto`` does not take ``rowwise``.
    :raises ConfigurationError: where model, mesh and config do not fit.
    """
    _check(model, mesh, config)

    def initial(logical: LogicalParameter) -> Tensor:
        shape = _local_shape(logical)
        return initial_tensor(model.config, logical.name, shape, seed, logical.experts)

    backend = choose_backend(config.kernels, mesh.device.type)
    connection = connect_experts(model, mesh, config, max_tokens, backend)
    parameters = shard_experts(model, mesh)
    _wrap_forwards(model, config)
    wrap = DDPModel if config.mode == "ddp" else FSDPModel
    parallel_model = wrap(model, mesh, config, parameters, initial)
    for router in model.routers():
        router.to_empty(device=mesh.device, recurse=False)
        router.reset_buffers()
    parallel_model.connection, parallel_model.backend = connection, backend
    return parallel_model


def _check(model: Transformer, mesh: Mesh, config: ParallelConfig) -> None:
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ConfigurationError(
            "parallelize draws the weights itself: build the model under torch.device('meta'), and "
            "load weights afterwards (Checkpointer.load_weights)"
        )
    if mesh.expert_parallel != config.expert_parallel:
        raise ConfigurationError(
            f"the mesh has expert_parallel = {mesh.expert_parallel}, the config "
            f"{config.expert_parallel}"
        )
    moe = model.config.moe
    if moe is not None and (problem := experts_problem(config.expert_parallel, moe.num_experts)):
        raise ConfigurationError(problem)


def _local_shape(logical: LogicalParameter) -> torch.Size:
    if logical.experts is None:
        return logical.shape
    return torch.Size([len(logical.experts), *logical.shape[1:]])


def _wrap_forwards(model: nn.Module, config: ParallelConfig) -> None:
    """Replace forwards, not modules: hooks stay outside and eager, names stay as they are."""
    for block in model.modules():
        if not isinstance(block, Block):
            continue
        if config.compile:
            _compile_static_parts(block)
        if config.activation_checkpointing == "full":
            block.forward = checkpointed(block.forward)


def _compile_static_parts(block: Block) -> None:
    """Attention and the dense feed-forwards, each one whole graph.

    Routing decides the sizes of all else in a MoE layer: compiled, it would be compiled again with
    each batch, or break the graph in the middle of a block.
    """
    block.attend = torch.compile(block.attend, fullgraph=True, dynamic=False)
    for module in block.modules():
        if isinstance(module, FeedForward):
            module.forward = torch.compile(module.forward, fullgraph=True, dynamic=False)
