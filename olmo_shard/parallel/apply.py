"""Everything that makes a single-device model parallel, in one order."""

import torch
from torch import Tensor, nn

from olmo_shard.config import ParallelConfig
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.nn.feed_forward import FeedForward
from olmo_shard.nn.init import initial_tensor
from olmo_shard.nn.recompute import checkpointed
from olmo_shard.nn.transformer import Block, Transformer
from olmo_shard.parallel.ddp import DistributedDataParallel
from olmo_shard.parallel.expert import spread_experts
from olmo_shard.parallel.fsdp import FullyShardedDataParallel
from olmo_shard.parallel.shards import DataParallel, LogicalParameter


def parallelize(
    model: Transformer, mesh: Mesh, config: ParallelConfig, seed: int = 0
) -> DataParallel:
    """Spread a model over the ranks of a mesh; collective over all ranks.

    :param model: built on the meta device, then its weights are drawn from ``seed``, each rank
        drawing only what it keeps; or with real weights, equal on all ranks, which are kept.
    :param mesh: made with the same ``expert_parallel`` as the config's.
    :param seed: of the initial weights.
    """
    assert mesh.expert_parallel == config.expert_parallel

    def initial(logical: LogicalParameter, tensor: Tensor) -> Tensor:
        if not tensor.is_meta and logical.name in real:
            return tensor.detach().float().cpu()
        return initial_tensor(
            model.config, logical.name, _local_shape(logical), seed, logical.experts
        )

    real = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    parameters = spread_experts(model, mesh, config)
    _wrap_forwards(model, config)
    wrap = DistributedDataParallel if config.mode == "ddp" else FullyShardedDataParallel
    if real:
        model.to(mesh.device)
    data_parallel = wrap(model, mesh, config, parameters, initial)
    if not real:
        _fresh_buffers(model, mesh.device)
    return data_parallel


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


def _fresh_buffers(model: Transformer, device: torch.device) -> None:
    for router in model.routers():
        router.to_empty(device=device, recurse=False) if router.expert_bias.is_meta else None
        router.reset_buffers()
