"""The distributed optimizer: FP32 main weights and moments, each element on one rank of the world.

[Note: phases]

- *reduce*: sum the window's gradients over the ranks; each rank gets the slices that it owns. Most
  of it has happened during the last backward.
- *norm*: one all-reduce of one FP64 vector: the squares of the owned gradients, and whatever else
  the step needs from all ranks (losses, expert counts). Apply the step or skip it.
- *step*: clip and update the own main weights, slice by slice in the order of forward.
- *gather*: each slice's new weights start on their way to every model as soon as they are there,
  and arrive during the next forward.

Both modes go through the same phases; in ``fsdp`` reduce and gather happen inside backward and
forward. Gradients are sums over the window's tokens divided by their global number, so no factor of
world size, EP degree or accumulation appears anywhere.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.config import OptimConfig
from olmo_shard.distributed import collectives
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.optim.adamw import DecayRuns, SliceState, StepScalars, adamw_, sgd_
from olmo_shard.optim.norm import squares
from olmo_shard.parallel.shards import MainSlice, ParallelModel

StepFilter = Callable[[Tensor, Tensor], Tensor]
"""From (gradient norm, extra values summed over all ranks) to a boolean scalar: apply the step?"""


class StepResult(NamedTuple):
    """Device tensors, equal on every rank; reading them waits for the step."""

    grad_norm: Tensor
    """FP64 scalar, before clipping."""
    applied: Tensor
    """Boolean scalar: false if the step was skipped."""
    sums: Tensor
    """FP64: the extra values, summed over all ranks."""
    squares: Tensor
    """FP64 [shards]: this rank's part of the squared norm, by shard; not equal on every rank."""


class DistributedOptimizer:
    """AdamW or SGD on the slices of a parallel model.

    :param parallel_model: what ``parallelize`` returned.
    """

    def __init__(self, parallel_model: ParallelModel, mesh: Mesh, config: OptimConfig) -> None:
        self.parallel_model, self.mesh, self.config = parallel_model, mesh, config
        self.slices = parallel_model.slices
        self.adam = config.name == "adamw"
        moments = self.slices if self.adam else []
        self.exp_avgs = [torch.zeros_like(part.main) for part in moments]
        self.exp_avg_sqs = [torch.zeros_like(part.main) for part in moments]
        self.step_count = torch.zeros((), dtype=torch.float32, device=mesh.device)
        """Steps applied: Adam's t. A skipped step does not count."""
        self.decay_runs = [self._decay_runs(part) for part in self.slices]

    @torch.no_grad()
    def step(
        self, lr: float, extra: Tensor | None = None, judge: StepFilter | None = None
    ) -> StepResult:
        """Run all phases after the last backward of a window.

        :param lr: learning rate of this step.
        :param extra: values to sum over all ranks in the same all-reduce as the norm.
        :param judge: may skip a step whose norm is finite, equally on every rank.
        """
        self.parallel_model.reduce()
        result = self._norm(extra, judge)
        scalars = self._scalars(lr, result)
        for index in range(len(self.slices)):
            self._step(index, scalars)
            self.parallel_model.gather(index)
        return result

    def _norm(self, extra: Tensor | None, judge: StepFilter | None) -> StepResult:
        gradients = [
            shard.of(gradient)
            for part in self.slices
            for gradient in [part.gradient()]
            for shard in part.shards
        ]
        by_shard = squares(gradients)
        total = by_shard.to(self.mesh.device).sum(dim=0, keepdim=True)
        more = total.new_zeros(0) if extra is None else extra.to(torch.float64)
        control = torch.cat([total, more])
        collectives.all_reduce(control, self.mesh.control, kind="control")
        grad_norm, sums = control[0].sqrt(), control[1:]
        applied = grad_norm.isfinite()
        if judge is not None:
            applied = applied & judge(grad_norm, sums)
        return StepResult(grad_norm, applied, sums, by_shard)

    def _scalars(self, lr: float, result: StepResult) -> StepScalars:
        limit = self.config.max_grad_norm
        divisor = (result.grad_norm / limit).clamp(min=1).float() if limit else None
        self.step_count += result.applied
        return StepScalars(
            lr=lr,
            config=self.config,
            divisor=divisor,
            skip=(~result.applied).float(),
            step=self.step_count,
        )

    def _step(self, index: int, scalars: StepScalars) -> None:
        part, runs = self.slices[index], self.decay_runs[index]
        gradient = part.gradient()
        if not self.adam:
            sgd_(part.main, gradient, part.model, runs, scalars)
            return
        state = SliceState(
            main=part.main,
            grad=gradient,
            exp_avg=self.exp_avgs[index],
            exp_avg_sq=self.exp_avg_sqs[index],
            model=part.model,
        )
        adamw_(state, runs, scalars, self.parallel_model.backend)

    def _decay_runs(self, part: MainSlice) -> DecayRuns:
        """The runs of a slice with and without decay; padding goes with what is before it."""
        starts: list[int] = []
        free: list[bool] = []
        for shard in part.shards:
            if not free or free[-1] != self._is_free(shard.name):
                starts.append(shard.start if free else 0)
                free.append(self._is_free(shard.name))
        # A slice may be padding alone: the end of a small parameter's bucket on many ranks.
        sizes = [end - start for start, end in pairwise([*(starts or [0]), part.main.numel()])]
        decay = self.config.weight_decay
        return DecayRuns(sizes, (0.0, decay) if free[:1] == [True] else (decay, 0.0))

    def _is_free(self, name: str) -> bool:
        """Whether a parameter has no decay."""
        return any(fnmatchcase(name, pattern) for pattern in self.config.no_decay)
