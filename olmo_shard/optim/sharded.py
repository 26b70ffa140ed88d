"""The distributed optimizer: FP32 main weights and moments, each element on one rank of the world.

[Note: phases]

- *reduce*: sum the window's gradients over the ranks; each rank gets the slices that it owns.
- *norm*: one all-reduce of one FP64 vector: the squares of the owned gradients, and whatever else
  the step needs from all ranks (losses, expert counts).
- *step*: clip, decide whether to skip, update the own main weights.
- *gather*: bring the new weights of all ranks into every model.

Both modes go through the same phases; in ``fsdp`` reduce and gather happen inside backward and
forward. Gradients are sums over the window's tokens divided by their global number, so no factor of
world size, EP degree or accumulation appears anywhere.
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.config import OptimConfig
from olmo_shard.distributed import collectives
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.optim.adamw import StepScalars, adamw_, sgd_
from olmo_shard.parallel.shards import ParallelModel, ParameterShard


class StepResult(NamedTuple):
    """Device tensors, equal on every rank; reading them waits for the step."""

    grad_norm: Tensor
    """FP64 scalar, before clipping."""
    applied: Tensor
    """Boolean scalar: false if the step was skipped because the norm was not finite."""
    sums: Tensor
    """FP64: the extra values, summed over all ranks."""
    squares: Tensor
    """FP64 [shards]: this rank's part of the squared norm, by shard; not equal on every rank."""


class DistributedOptimizer:
    """AdamW or SGD on the shards of a parallel model.

    :param data_parallel: what ``parallelize`` returned.
    """

    def __init__(self, data_parallel: ParallelModel, mesh: Mesh, config: OptimConfig) -> None:
        self.data_parallel, self.mesh, self.config = data_parallel, mesh, config
        self.shards = data_parallel.shards
        self.adam = config.name == "adamw"
        self.exp_avgs = [torch.zeros_like(shard.main) for shard in self.shards if self.adam]
        self.exp_avg_sqs = [torch.zeros_like(shard.main) for shard in self.shards if self.adam]
        self.step_count = torch.zeros((), dtype=torch.float32, device=mesh.device)
        """Steps applied: Adam's t. A skipped step does not count."""
        self._groups = [self._indices(decayed=True), self._indices(decayed=False)]

    @torch.no_grad()
    def step(self, lr: float, extra: Tensor | None = None) -> StepResult:
        """Run all phases after the last backward of a window.

        :param lr: learning rate of this step.
        :param extra: values to sum over all ranks in the same all-reduce as the norm.
        """
        self.data_parallel.reduce()
        grads = [shard.gradient() for shard in self.shards]
        result = self._norm(grads, extra)
        self._step(grads, lr, result)
        self.data_parallel.gather()
        return result

    def _norm(self, grads: list[Tensor], extra: Tensor | None) -> StepResult:
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        squares = torch.stack(norms).square() if norms else torch.zeros(0, dtype=torch.float64)
        total = squares.to(self.mesh.device).sum(dim=0, keepdim=True)
        more = total.new_zeros(0) if extra is None else extra.to(torch.float64)
        control = torch.cat([total, more])
        collectives.all_reduce(control, self.mesh.control, kind="control")
        grad_norm = control[0].sqrt()
        return StepResult(grad_norm, grad_norm.isfinite(), control[1:], squares)

    def _step(self, grads: list[Tensor], lr: float, result: StepResult) -> None:
        limit = self.config.max_grad_norm
        ratio = result.grad_norm / limit if limit else torch.zeros_like(result.grad_norm)
        scalars = StepScalars(
            lr=lr, divisor=ratio.clamp(min=1).float(), skip=(~result.applied).float()
        )
        self.step_count += result.applied
        decays = (self.config.weight_decay, 0.0)
        for indices, weight_decay in zip(self._groups, decays, strict=True):
            mains = [self.shards[i].main for i in indices]
            members = [grads[i] for i in indices]
            if not self.adam:
                sgd_(mains, members, scalars, weight_decay)
            elif mains:
                exp_avgs = [self.exp_avgs[i] for i in indices]
                exp_avg_sqs = [self.exp_avg_sqs[i] for i in indices]
                steps = [self.step_count] * len(indices)
                adamw_(
                    mains, members, exp_avgs, exp_avg_sqs, steps, scalars, self.config, weight_decay
                )

    def _indices(self, *, decayed: bool) -> list[int]:
        return [i for i, shard in enumerate(self.shards) if self._decays(shard) == decayed]

    def _decays(self, shard: ParameterShard) -> bool:
        return not any(fnmatchcase(shard.name, pattern) for pattern in self.config.no_decay)
