"""What the optimizer and the checkpoint see of a model, whatever the mode.

A shard of anything is a set of contiguous ranges of a flattened logical tensor. That is true of
slices of buckets, of FSDP2's shards, and of stacked experts spread over ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class LogicalParameter:
    """A parameter as the whole run sees it."""

    name: str
    """Without any wrapper's prefix."""
    shape: torch.Size
    """Over all ranks: routed experts count all E."""
    experts: range | None
    """Global ids of the routed experts in this rank's tensor; null for a dense parameter."""

    @property
    def local_offset(self) -> int:
        """Where this rank's tensor starts in the flattened logical tensor."""
        return 0 if self.experts is None else self.experts.start * self.shape[1:].numel()


InitialValue = Callable[[LogicalParameter], Tensor]
"""The FP32 value of a rank's tensor, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """The part of a parameter that this rank alone owns and updates."""

    name: str
    shape: torch.Size
    """Of the logical parameter."""
    chunks: tuple[tuple[int, int], ...]
    """(offset, length) in the flattened logical parameter; ``main`` is their concatenation."""
    main: Tensor
    """FP32 [n]: the main weights."""
    gradient: Callable[[], Tensor]
    """FP32 [n]: valid after ``reduce``."""


class ParallelModel(ABC):
    """A model whose gradients are summed over the ranks and whose main weights are sharded.

    One step: ``begin_window``; for each micro-batch ``begin_microbatch``, forward, backward; then
    the phases ``reduce``, norm, step (both in the optimizer), ``gather``.
    """

    model: nn.Module
    shards: list[ParameterShard]

    @abstractmethod
    def begin_window(self) -> None:
        """Forget the gradients of the last window."""

    @abstractmethod
    def begin_microbatch(self, *, last: bool) -> None:
        """Before each forward; ``last`` in the window's last micro-batch."""

    @abstractmethod
    def reduce(self) -> None:
        """Sum the window's gradients over the ranks, into the shards."""

    @abstractmethod
    def gather(self) -> None:
        """Bring the updated main weights of all ranks into every rank's model."""
