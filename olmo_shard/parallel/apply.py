"""Everything that makes a single-device model parallel, in one ordered function."""

import torch
from torch import Tensor, nn

from olmo_shard.config import ParallelConfig
from olmo_shard.config.layout import experts_problem
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import ConfigurationError
from olmo_shard.kernels.backend import choose_backend
from olmo_shard.nn.protocol import LanguageModel
from olmo_shard.nn.recompute import checkpointed
from olmo_shard.parallel.ddp import DDPModel
from olmo_shard.parallel.dispatchers import install_dispatcher
from olmo_shard.parallel.expert import shard_experts
from olmo_shard.parallel.fsdp import FSDPModel
from olmo_shard.parallel.shards import LogicalParameter, ParallelModel


def parallelize(
    model: LanguageModel,
    mesh: Mesh,
    config: ParallelConfig,
    seed: int = 0,
    max_tokens: int | None = None,
) -> ParallelModel:
    """Spread a model over the ranks of a mesh, and draw its weights; collective over all ranks.

    :param model: a model on the meta device. Each rank draws only the routed experts that it holds.
    :param mesh: a mesh with the config's ``expert_parallel``.
    :param seed: seed of the initial weights.
    :param max_tokens: largest number of tokens per micro-batch and rank, evaluation included.
        ``dispatch: rowwise`` sizes its mailboxes by it; without it ``auto`` does not take
        ``rowwise``.
    :raises ConfigurationError: if model, mesh and config do not fit each other.
    """
    _check(model, mesh, config)
    backend = choose_backend(config.kernels, mesh.device.type)

    # 1. The dispatcher, before any parameter changes: it reads the sizes of the whole MoE layers,
    #    and a transport that cannot run here must fail before weights are allocated.
    choice = install_dispatcher(model, mesh, config, max_tokens, backend)

    # 2. Each rank's experts, before any storage exists: no rank could hold all experts. The names
    #    and logical shapes of all parameters come from here.
    parameters = shard_experts(model, mesh)

    # 3. Recompute and compile, before the mode: they replace forwards of modules, and the hooks of
    #    step 4 must stay outside of compiled and of recomputed code.
    _wrap_forwards(model, config)

    # 4. ddp or fsdp, last: it allocates storage, draws the weights, and installs its hooks.
    def initial(logical: LogicalParameter) -> Tensor:
        return model.initial_value(logical.name, _local_shape(logical), seed, logical.experts)

    wrap = DDPModel if config.mode == "ddp" else FSDPModel
    parallel_model = wrap(model, mesh, config, parameters, initial, backend)
    # Buffers are whole on every rank in both modes. FSDP allocates them without values.
    model.place_buffers(mesh.device)
    parallel_model.dispatcher_choice = choice
    return parallel_model


def _check(model: LanguageModel, mesh: Mesh, config: ParallelConfig) -> None:
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


def _wrap_forwards(model: LanguageModel, config: ParallelConfig) -> None:
    """Compile what the modules declare as ``compiled_methods``, and recompute whole blocks.

    Methods are replaced on the instances, and modules are not wrapped: hooks stay outside and
    eager, and parameters keep their names.
    """
    if config.compile:
        for module in model.modules():
            _compile(module)
    if config.activation_checkpointing == "full":
        for block in model.blocks:
            block.forward = checkpointed(block.forward)


def _compile(module: nn.Module) -> None:
    for name in getattr(module, "compiled_methods", ()):
        method = torch.compile(getattr(module, name), fullgraph=True, dynamic=False)
        setattr(module, name, method)
