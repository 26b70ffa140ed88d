"""Mode ``fsdp``: PyTorch FSDP2 on the same model, names, optimizer and checkpoint, for comparison.

Dense parameters are sharded over all ranks, routed experts over the ranks that hold the same ones.
Gradients are summed, never divided, and reduced in FP32; the main weights are the FP32 shards.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from olmo_shard.config import ParallelConfig
from olmo_shard.config.layout import leaves_no_rank_empty
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.nn.experts import RoutedExperts
from olmo_shard.nn.transformer import Block
from olmo_shard.parallel import fsdp_comm
from olmo_shard.parallel.fsdp_unused import fill_accumulated, reduce_unused
from olmo_shard.parallel.shards import (
    InitialValue,
    LogicalParameter,
    MainSlice,
    ParallelModel,
    ParameterShard,
)


class FSDPModel(ParallelModel):
    """FSDP2 behind the interface of the distributed optimizer.

    :param model: cut to this rank's experts already.
    :param parameters: what ``shard_experts`` returned.
    :param initial: the value of each parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        config: ParallelConfig,
        parameters: list[LogicalParameter],
        initial: InitialValue,
    ) -> None:
        self.model = model
        self.keeps_window = config.fsdp.reshard == "window"
        self._first_microbatch = True
        _fully_shard(model, mesh, config)
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self.modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            reduce_unused(module)
        fsdp_comm.set_up(model, mesh.device)
        model.to_empty(device=mesh.device)
        self.slices = []
        self._parameters: list[nn.Parameter] = []
        for logical in parameters:
            parameter = model.get_parameter(logical.name)
            assert isinstance(parameter, DTensor)
            self._parameters.append(parameter)
            part = _slice(logical, parameter)
            if part.main.numel():
                _fill(part, logical, initial(logical).flatten())
                self.slices.append(part)

    def begin_window(self) -> None:
        # Not model.zero_grad: while weights are gathered, as after an evaluation in ``window``, the
        # model's parameters are the whole ones, and the shards would keep their old gradients.
        for parameter in self._parameters:
            parameter.grad = None
        self._first_microbatch = True

    def begin_microbatch(self, *, last: bool) -> None:
        if not self.keeps_window:
            return
        for module in self.modules:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)
            if last and not self._first_microbatch:
                fill_accumulated(module)
        self._first_microbatch = False

    def reduce(self) -> None:
        """FSDP2 has reduced in backward."""

    def gather(self, index: int) -> None:
        """FSDP2 gathers before each forward."""

    def wait(self) -> None:
        """Drop what is gathered, since the shards are about to be read or written."""
        for module in self.modules:
            module.reshard()


def _fully_shard(model: nn.Module, mesh: Mesh, config: ParallelConfig) -> None:
    """Experts, then blocks, then the rest: inner modules first, as FSDP2 wants it."""
    dtype = getattr(torch, config.compute_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        # The weights of routes and RoPE tables stay FP32 where they cross a module's border.
        cast_forward_inputs=False,
    )
    reshard = config.fsdp.reshard == "forward"
    dense, expert = mesh.device_mesh(mesh.bulk), mesh.device_mesh(mesh.ep_dp)
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            # Where a cut of the experts would leave a rank without one, cut dimension 1.
            cut = Shard(0 if leaves_no_rank_empty(module.w_down.shape[0], mesh.ep_dp.size()) else 1)
            fully_shard(
                module,
                mesh=expert,
                mp_policy=policy,
                reshard_after_forward=reshard,
                shard_placement_fn=lambda _, cut=cut: cut,
            )
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=dense, mp_policy=policy, reshard_after_forward=reshard)
    # The root stays gathered after forward, FSDP2's default: backward needs the head at once.
    fully_shard(model, mesh=dense, mp_policy=policy, reshard_after_forward=False)


def _slice(logical: LogicalParameter, parameter: DTensor) -> MainSlice:
    local = parameter.to_local().detach()
    assert local.is_contiguous()

    def gradient() -> Tensor:
        grad = parameter.grad
        if grad is None:  # no micro-batch used the parameter
            return torch.zeros_like(local).view(-1)
        assert isinstance(grad, DTensor)
        return grad.to_local().view(-1)

    shard = ParameterShard(
        name=logical.name, shape=logical.shape, chunks=_chunks(logical, parameter), start=0
    )
    main = local.view(-1)
    return MainSlice(main=main, model=main, gradient=gradient, shards=(shard,))


def _chunks(logical: LogicalParameter, parameter: DTensor) -> tuple[tuple[int, int], ...]:
    """Ranges of this rank's shard: one if dimension 0 is cut, one an expert if dimension 1 is."""
    (placement,) = parameter.placements
    assert isinstance(placement, Shard)
    mesh, shape = parameter.device_mesh, parameter.shape
    step = -(-shape[placement.dim] // mesh.size())
    start = min(mesh.get_local_rank() * step, shape[placement.dim])
    length = parameter.to_local().shape[placement.dim]
    inner = shape[placement.dim + 1 :].numel()
    outer = range(1) if placement.dim == 0 else range(shape[0])
    stride = shape[placement.dim :].numel()
    base = logical.local_offset + start * inner
    return tuple((base + index * stride, length * inner) for index in outer if length)


def _fill(part: MainSlice, logical: LogicalParameter, value: Tensor) -> None:
    base = logical.local_offset
    chunks = part.shards[0].chunks
    parts = [value[start - base : start - base + length] for start, length in chunks]
    part.main.copy_(torch.cat(parts))
