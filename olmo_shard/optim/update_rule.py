"""The seam between the distributed optimizer and an update rule such as AdamW.

[Note: adding an update rule] A rule is one file with a subclass of ``UpdateRule``, one line in
``optim/rules.py``, and one word in the ``Literal`` of ``OptimConfig.name``. ``update`` gets one
flat slice at a time: FP32 main weights, their summed gradient, and the rule's state, which is one
FP32 value per weight and state name. The distributed optimizer computes the norm, decides whether
to skip the step, and runs all collectives. Checkpoints save and load the state by its names.

[Note: rules that need whole matrices] Borders between slices fall inside parameters, so a rule of
today must be elementwise. Muon needs each matrix on one rank. Two places would change:

- ``make_buckets`` in ``parallel/buckets.py``. A bucket for such a rule holds K matrices of one
  shape (a stacked tensor of experts counts as one matrix per expert). Its slices have the length of
  ceil(K / ranks) matrices, so no border falls inside a matrix. Reduce, gather, norm and checkpoints
  stay as they are: they read each shard's range from ``ParameterShard``, whatever the cut.
- ``UpdateRule``. A class attribute says which parameters need whole matrices; ``experiment.run``
  passes it through ``parallelize`` to ``make_buckets``. In ``update`` each shard has its range in
  the slice and its logical shape, and can be viewed as matrices.

FSDP2 cuts dimension 0 of each parameter. In mode ``fsdp`` such a rule would have to gather each
matrix, or be refused.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, groupby, pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from olmo_shard.config import OptimConfig
from olmo_shard.kernels.backend import Backend
from olmo_shard.optim.parameter_groups import GroupSettings
from olmo_shard.parallel.shards import OwnedSlice

WEIGHTS_KEY = "model"
"""Checkpoint key of the main weights, beside the state names of a rule."""


@dataclass(frozen=True, kw_only=True)
class StepScalars:
    """The values that all parameters share in one step.

    Values that are known only after the reduce stay on the device: a step needs no host sync.
    """

    lr: float
    """Learning rate, before the multiplier of a parameter group."""
    divisor: Tensor | None
    """FP32 scalar >= 1 that gradients are divided by; ``None`` without clipping, which saves a
    store on a CPU."""
    skip: Tensor
    """FP32 scalar: 1 leaves weights and state as they are, 0 applies the step."""
    step: Tensor
    """FP32 scalar: number of steps applied, this one included (Adam's t)."""


class Segment(NamedTuple):
    """A run of neighbouring weights with the same settings."""

    numel: int
    settings: GroupSettings


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerSlice:
    """An owned slice with everything that an update needs: one object per slice.

    All tensors have the n elements of ``owned.main``.
    """

    owned: OwnedSlice
    """Main weights, gradient and shards. In mode ``ddp`` it is also the slice's bucket."""
    state: dict[str, Tensor]
    """FP32 [n] each: the rule's state by its state names."""
    segments: tuple[Segment, ...]
    """Segments in order; they add up to n. Padding belongs to the segment before it."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint holds, by the first part of their keys."""
        return {WEIGHTS_KEY: self.owned.main, **self.state}

    def split(self, *flats: Tensor) -> Iterator[tuple[GroupSettings, list[list[Tensor]]]]:
        """The segments of each distinct settings.

        :param flats: tensors [n].
        :returns: for each distinct settings, one list per flat tensor with its views.
        """
        # One split per tensor; compress then picks the views of one settings, in order.
        sizes = [segment.numel for segment in self.segments]
        columns = [flat.split(sizes) for flat in flats]
        for settings, mask in self._masks.items():
            yield settings, [list(compress(column, mask)) for column in columns]

    @cached_property
    def _masks(self) -> dict[GroupSettings, list[bool]]:
        """For each distinct settings, which segments have them."""
        distinct = dict.fromkeys(segment.settings for segment in self.segments)
        return {
            settings: [segment.settings == settings for segment in self.segments]
            for settings in distinct
        }


class UpdateRule(ABC):
    """Updates main weights and state of slices.

    :param config: the section ``optim``.
    :param backend: back end of the kernels, chosen once for the model.
    """

    state_names: ClassVar[tuple[str, ...]]
    """Names of the state tensors. They are the first part of checkpoint keys: the state ``exp_avg``
    of ``norm.weight`` is saved as ``exp_avg.norm.weight``. ``model`` and ``buffer`` are taken."""

    def __init__(self, config: OptimConfig, backend: Backend) -> None:
        self.config, self.backend = config, backend

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        """State of a slice before its first step: zeros, unless a rule says otherwise.

        :param main: FP32 [n] main weights of the slice.
        :returns: FP32 [n] tensors by state name.
        """
        return {name: torch.zeros_like(main) for name in self.state_names}

    def begin_step(self, scalars: StepScalars) -> None:  # noqa: B027 - most rules share nothing
        """Compute values that the updates of all slices share, once per step."""

    @abstractmethod
    def update(self, part: OptimizerSlice, scalars: StepScalars) -> None:
        """Apply one step to a slice, in place, without a host sync.

        A rule divides the gradient by ``scalars.divisor``, leaves weights and state alone where
        ``scalars.skip`` is 1 (the gradient may then be infinite or NaN), honours the settings of
        each segment, and writes the new weights to the model (``owned.update_model``). It may
        overwrite the gradient.
        """


def make_slice(
    owned: OwnedSlice, rule: UpdateRule, settings: Mapping[str, GroupSettings]
) -> OptimizerSlice:
    """An owned slice with its initial state and its segments.

    :param settings: settings of each parameter, by name.
    """
    return OptimizerSlice(
        owned=owned,
        state=rule.init_state(owned.main),
        segments=_segments(owned, settings),
    )


def _segments(owned: OwnedSlice, settings: Mapping[str, GroupSettings]) -> tuple[Segment, ...]:
    """Runs of shards with the same settings, from the start of the slice to its end."""
    by_run = groupby(owned.shards, key=lambda shard: settings[shard.name])
    runs = [(run_settings, next(shards).start) for run_settings, shards in by_run]
    numel = owned.main.numel()
    # A slice may be padding alone: the end of a small parameter's bucket on many ranks.
    if not runs:
        return (Segment(numel, GroupSettings(lr_multiplier=1.0, weight_decay=0.0)),)
    # The first run starts at 0, whatever padding comes before its first shard.
    borders = [0, *(start for _, start in runs[1:]), numel]
    lengths = [end - start for start, end in pairwise(borders)]
    return tuple(
        Segment(length, run_settings)
        for length, (run_settings, _) in zip(lengths, runs, strict=True)
    )
