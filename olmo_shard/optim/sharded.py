"""The distributed optimizer: FP32 main weights and state, each element on one rank of the world.

[Note: phases] A step has four phases:

- *reduce*: sum the window's gradients over the ranks. Each rank gets the sums of the slices that it
  owns. Most of this phase has happened during the last backward.
- *norm*: one all-reduce of one FP64 vector. It holds the squared norms of the owned gradients and
  the other values that the step needs from all ranks (losses, expert counts). All ranks then apply
  the step, or all skip it.
- *step*: clip, and update this rank's main weights, slice by slice in the order of forward.
- *gather*: each slice's new weights start on their way to every model right after their update, and
  arrive during the next forward.

Both modes go through these phases; in ``fsdp`` reduce and gather happen inside backward and
forward. A gradient is the sum over the window's tokens divided by their global number, so no factor
of world size, EP degree or accumulation appears anywhere.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.config import OptimConfig
from olmo_shard.distributed import collectives
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.optim.grad_norm import squared_norms
from olmo_shard.optim.parameter_groups import group_parameters
from olmo_shard.optim.rules import RULES
from olmo_shard.optim.update_rule import StepScalars, make_slice
from olmo_shard.parallel.shards import ParallelModel

StepFilter = Callable[[Tensor, Tensor], Tensor]
"""From gradient norm and extra sums over all ranks to a boolean scalar: whether to apply a step."""


class StepResult(NamedTuple):
    """Device tensors. Reading one waits for the step."""

    grad_norm: Tensor
    """FP64 scalar, before clipping; equal on every rank."""
    applied: Tensor
    """Boolean scalar: false if the step was skipped; equal on every rank."""
    sums: Tensor
    """FP64: the extra sums, over all ranks; equal on every rank."""
    squared_norms: Tensor
    """FP64 [shards]: this rank's part of the squared norm, in the order of
    ``ParallelModel.shards``."""


class DistributedOptimizer:
    """Runs an update rule on the slices of a parallel model.

    :param parallel_model: what ``parallelize`` returned.
    :raises ConfigurationError: if ``optim.groups`` does not fit the model.
    """

    def __init__(self, parallel_model: ParallelModel, mesh: Mesh, config: OptimConfig) -> None:
        self.parallel_model, self.mesh, self.config = parallel_model, mesh, config
        self.rule = RULES[config.name](config, parallel_model.backend)
        sizes = {parameter.name: parameter.shape.numel() for parameter in parallel_model.parameters}
        self.groups = group_parameters(sizes, config)
        """Parameter groups of the whole run, for the log."""
        settings = {name: group.settings for group in self.groups for name in group.sizes}
        self.slices = [make_slice(owned, self.rule, settings) for owned in parallel_model.slices]
        """This rank's slices in the order of forward, with their state."""
        self.step_count = torch.zeros((), dtype=torch.float32, device=mesh.device)
        """Number of steps applied (Adam's t). A skipped step does not count."""

    @torch.no_grad()
    def step(
        self,
        lr: float,
        extra_sums: Tensor | None = None,
        step_filter: StepFilter | None = None,
    ) -> StepResult:
        """Run all phases after the last backward of a window.

        :param lr: learning rate of this step, before the multipliers of parameter groups.
        :param extra_sums: values to sum over all ranks in the all-reduce of the norm.
        :param step_filter: may skip a step whose norm is finite, equally on every rank.
        """
        # Phase reduce: after it each slice holds its summed gradient.
        self.parallel_model.reduce()

        # Phase norm: one all-reduce, then the scalars that every update uses.
        result = self._norm(extra_sums, step_filter)
        scalars = self._scalars(lr, result)

        # Phases step and gather, slice by slice: the slices that forward reads first travel while
        # the later ones are updated.
        self.rule.begin_step(scalars)
        for part in self.slices:
            self.rule.update(part, scalars)
            self.parallel_model.gather(part.owned)
        return result

    def _norm(self, extra_sums: Tensor | None, step_filter: StepFilter | None) -> StepResult:
        """Phase norm: the global gradient norm, and whether to apply the step."""
        # Shards, without the padding between them: a norm per shard names the parameter whose
        # gradient is not finite.
        gradients = [
            shard.of(gradient)
            for part in self.slices
            for gradient in [part.owned.gradient()]
            for shard in part.owned.shards
        ]
        by_shard = squared_norms(gradients)

        # One vector for all that the ranks must agree on.
        total = by_shard.to(self.mesh.device).sum(dim=0, keepdim=True)
        extra = total.new_zeros(0) if extra_sums is None else extra_sums.to(torch.float64)
        control = torch.cat([total, extra])
        collectives.all_reduce(control, self.mesh.control, kind="control")
        grad_norm, sums = control[0].sqrt(), control[1:]

        # The decision stays on the device; it follows from equal values on every rank.
        applied = grad_norm.isfinite()
        if step_filter is not None:
            applied = applied & step_filter(grad_norm, sums)
        return StepResult(grad_norm, applied, sums, by_shard)

    def _scalars(self, lr: float, result: StepResult) -> StepScalars:
        limit = self.config.max_grad_norm
        # On the device: max(1, norm / limit). A norm that is not finite makes a skipped step.
        divisor = (result.grad_norm / limit).clamp(min=1).float() if limit else None
        self.step_count += result.applied
        return StepScalars(
            lr=lr,
            divisor=divisor,
            skip=(~result.applied).float(),
            step=self.step_count,
        )
