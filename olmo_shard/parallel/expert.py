"""Expert parallelism: each rank keeps a slice of the routed experts of every layer."""

import torch
from torch import Tensor, nn

from olmo_shard.distributed.mesh import Mesh
from olmo_shard.nn.experts import RoutedExperts
from olmo_shard.parallel.shards import LogicalParameter


def shard_experts(model: nn.Module, mesh: Mesh) -> list[LogicalParameter]:
    """Cut the routed experts of a model to this rank's slice.

    Works on the meta device and on real weights.

    :returns: all parameters of the model, in order of definition, with their logical shapes. The
        modules that own the parameters decide which of them are experts; a mark on a parameter
        could get lost in a cast.
    """
    # Before the cut: the logical shape of an expert parameter counts all experts.
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    experts_of: dict[str, range] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            kept = mesh.local_experts(module.w_gate_up.shape[0])
            for name, parameter in list(module.named_parameters(recurse=False)):
                experts_of[f"{prefix}.{name}"] = kept
                setattr(module, name, nn.Parameter(_slice(parameter, kept)))
    return [
        LogicalParameter(name=name, shape=shape, experts=experts_of.get(name))
        for name, shape in shapes.items()
    ]


def _slice(parameter: Tensor, kept: range) -> Tensor:
    # A clone, so that the memory of the other ranks' experts is freed.
    return parameter.detach()[kept.start : kept.stop].clone(memory_format=torch.contiguous_format)
