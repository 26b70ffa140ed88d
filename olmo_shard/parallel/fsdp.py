"""Mode ``fsdp``: PyTorch's FSDP2, for comparison with ``ddp``.

Model, parameter names, optimizer and checkpoints are those of ``ddp``. Dense parameters are sharded
over all ranks, routed experts over the ranks that hold the same experts. Gradients are summed,
never divided, and reduced in FP32. The main weights are FSDP2's FP32 shards.

[Note: phases in fsdp] The optimizer's phases map to FSDP2 as follows:

| phase | what FSDP2 does |
|---|---|
| reduce | reduce-scatter in backward: per micro-batch, or in the last one (``reshard: window``) |
| norm, step | nothing: the optimizer works on the shards |
| gather | all-gather before the forward of each unit, and before its backward if it was freed |
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from olmo_shard.config import ParallelConfig
from olmo_shard.config.layout import leaves_no_rank_empty
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.kernels.backend import Backend
from olmo_shard.nn.experts import RoutedExperts
from olmo_shard.nn.protocol import LanguageModel
from olmo_shard.parallel import fsdp_comm
from olmo_shard.parallel.fsdp_unused import fill_accumulated, reduce_unused
from olmo_shard.parallel.shards import (
    InitialValue,
    LogicalParameter,
    OwnedSlice,
    ParallelModel,
    ParameterShard,
)


class FSDPModel(ParallelModel):
    """FSDP2 with the interface that the distributed optimizer uses; see [Note: phases in fsdp].

    :param model: a model on the meta device that holds only this rank's experts.
    :param parameters: all parameters, as ``shard_experts`` returned them.
    :param initial: returns the initial value of a parameter.
    :param backend: back end of the kernels, chosen once for the model.
    """

    def __init__(
        self,
        model: LanguageModel,
        mesh: Mesh,
        config: ParallelConfig,
        parameters: list[LogicalParameter],
        initial: InitialValue,
        backend: Backend = "reference",
    ) -> None:
        self.model, self.backend = model, backend
        self.parameters = parameters
        self.keeps_window = config.fsdp.reshard == "window"
        self._first_microbatch = True
        # FSDP2 splits the parameters while they are on the meta device.
        _fully_shard(model, mesh, config)
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        # Sums, not means: losses are already divided by the tokens of the global batch.
        for module in self.modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            reduce_unused(module)
        for name in model.entry_points:
            register_fsdp_forward_method(model, name)
        fsdp_comm.set_up(model, mesh.device)
        # Only this rank's shards get storage. Each one with elements becomes a slice.
        model.to_empty(device=mesh.device)
        slices: list[FSDPSlice] = []
        self._parameters: list[nn.Parameter] = []
        for logical in parameters:
            # FSDP2 has replaced every parameter by a DTensor that holds this rank's shard.
            parameter = model.get_parameter(logical.name)
            assert isinstance(parameter, DTensor)
            self._parameters.append(parameter)
            part = _slice(logical, parameter)
            if part.main.numel():
                _fill(part, logical, initial(logical).flatten())
                slices.append(part)
        self.slices = slices

    def begin_window(self) -> None:
        """Drop the gradients of the previous window."""
        # model.zero_grad would miss the shards while weights are gathered, as they are after an
        # evaluation with ``reshard: window``: the model's parameters are then the gathered ones.
        for parameter in self._parameters:
            parameter.grad = None
        self._first_microbatch = True

    def begin_microbatch(self, *, last: bool) -> None:
        """Choose whether the next backward reduces gradients and frees gathered weights.

        :param last: whether this is the window's last micro-batch.
        """
        # ``reshard: forward`` reduces every micro-batch, and needs no switch.
        if not self.keeps_window:
            return
        for module in self.modules:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)
            if last and not self._first_microbatch:
                fill_accumulated(module)
        self._first_microbatch = False

    def reduce(self) -> None:
        """Nothing: FSDP2 has reduced in backward."""

    def gather(self, owned: OwnedSlice) -> None:
        """Do nothing: FSDP2 gathers before each forward."""

    def wait_for_weights(self) -> None:
        """Do nothing: no gather is under way outside of forward and backward."""

    def release_gathered_weights(self) -> None:
        """Reshard all modules, so that the parameters are the shards."""
        for module in self.modules:
            module.reshard()


@dataclass(frozen=True, kw_only=True, eq=False)
class FSDPSlice(OwnedSlice):
    """This rank's shard of one parameter."""

    parameter: DTensor

    def gradient(self) -> Tensor:
        """The shard of the gradient; zeros if no micro-batch used the parameter."""
        grad = self.parameter.grad
        if grad is None:
            return torch.zeros_like(self.main)
        assert isinstance(grad, DTensor)
        return grad.to_local().view(-1)


def _fully_shard(model: LanguageModel, mesh: Mesh, config: ParallelConfig) -> None:
    """Make FSDP units of the experts, the blocks and the model, inner modules first.

    A unit takes the parameters that no unit inside it has taken, so FSDP2 requires this order.
    """
    dtype = getattr(torch, config.compute_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        # Route weights and RoPE tables are inputs of modules, and must stay FP32.
        cast_forward_inputs=False,
    )
    reshard = config.fsdp.reshard == "forward"
    dense, expert = mesh.device_mesh(mesh.bulk), mesh.device_mesh(mesh.ep_dp)
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            # Split along the experts, unless a rank would get none: then along dimension 1.
            num_experts, ranks = module.w_down.shape[0], mesh.ep_dp.size()
            cut = Shard(0 if leaves_no_rank_empty(num_experts, ranks) else 1)
            fully_shard(
                module,
                mesh=expert,
                mp_policy=policy,
                reshard_after_forward=reshard,
                shard_placement_fn=lambda _, cut=cut: cut,
            )
    for block in model.blocks:
        fully_shard(block, mesh=dense, mp_policy=policy, reshard_after_forward=reshard)
    # The root stays gathered after forward, since backward needs the head at once.
    fully_shard(model, mesh=dense, mp_policy=policy, reshard_after_forward=False)


def _slice(logical: LogicalParameter, parameter: DTensor) -> FSDPSlice:
    """This rank's shard of a parameter, as a slice with one shard."""
    local = parameter.to_local().detach()
    assert local.is_contiguous()
    shard = ParameterShard(
        name=logical.name, shape=logical.shape, chunks=_chunks(logical, parameter), start=0
    )
    return FSDPSlice(main=local.view(-1), model_copy=None, shards=(shard,), parameter=parameter)


def _chunks(logical: LogicalParameter, parameter: DTensor) -> tuple[tuple[int, int], ...]:
    """Ranges of this rank's shard in the flattened logical parameter, as (offset, length).

    A split of dimension 0 gives one range, a split of dimension 1 one range per expert.
    """
    (placement,) = parameter.placements
    assert isinstance(placement, Shard)
    mesh, shape = parameter.device_mesh, parameter.shape
    # FSDP2 gives every rank ceil(size / ranks) rows, and the last ranks fewer or none.
    step = -(-shape[placement.dim] // mesh.size())
    start = min(mesh.get_local_rank() * step, shape[placement.dim])
    length = parameter.to_local().shape[placement.dim]
    inner = shape[placement.dim + 1 :].numel()
    outer = range(1) if placement.dim == 0 else range(shape[0])
    stride = shape[placement.dim :].numel()
    base = logical.local_offset + start * inner
    return tuple((base + index * stride, length * inner) for index in outer if length)


def _fill(part: FSDPSlice, logical: LogicalParameter, value: Tensor) -> None:
    """Copy this rank's ranges of a parameter's flattened initial value into its slice."""
    base = logical.local_offset
    chunks = part.shards[0].chunks
    parts = [value[start - base : start - base + length] for start, length in chunks]
    part.main.copy_(torch.cat(parts))
