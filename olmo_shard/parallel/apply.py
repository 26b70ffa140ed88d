"""Everything that makes a single-device model parallel, in one order."""

import torch
from torch import Tensor, nn

from olmo_shard.config import ParallelConfig
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.nn.init import initial_tensor
from olmo_shard.nn.moe import MoE
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
            if isinstance(block.feed_forward, MoE):
                # Sizes depend on the routing: compiled, they would be compiled again and again.
                eager = torch.compiler.disable(block.feed_forward.forward)
                block.feed_forward.forward = eager  # type: ignore[assignment]
            block.forward = torch.compile(block.forward)
        if config.activation_checkpointing == "full":
            block.forward = checkpointed(block.forward)


def _fresh_buffers(model: Transformer, device: torch.device) -> None:
    for router in model.routers():
        router.to_empty(device=device, recurse=False) if router.expert_bias.is_meta else None
        router.reset_buffers()
