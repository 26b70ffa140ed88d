"""What the optimizer and the checkpoint see of a model, whatever the mode.

A shard of anything is a set of contiguous ranges of a flattened logical tensor. That is true of
slices of buckets, of FSDP2's shards, and of stacked experts spread over ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from olmo_shard.kernels.backend import Backend
from olmo_shard.parallel.dispatchers import DispatcherChoice


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
    """The part of a parameter that this rank alone owns, as a range of a main slice."""

    name: str
    shape: torch.Size
    """Of the logical parameter."""
    chunks: tuple[tuple[int, int], ...]
    """(offset, length) in the flattened logical parameter; the range is their concatenation."""
    start: int
    """In the main slice."""

    @property
    def numel(self) -> int:
        return sum(length for _, length in self.chunks)

    def of(self, flat: Tensor) -> Tensor:
        """This shard's range of a tensor as long as its main slice."""
        return flat[self.start : self.start + self.numel]


@dataclass(frozen=True, kw_only=True)
class MainSlice:
    """Main weights that this rank alone owns and the optimizer updates in one go."""

    main: Tensor
    """FP32 [n]."""
    model: Tensor
    """[n] in compute precision: the same values in the model; ``main`` itself in FP32."""
    gradient: Callable[[], Tensor]
    """FP32 [n]: valid after ``reduce``."""
    shards: tuple[ParameterShard, ...]
    """In order; what lies between them is padding, zero for ever."""


class ParallelModel(ABC):
    """A model whose gradients are summed over the ranks and whose main weights are sharded.

    One step: ``begin_window``; for each micro-batch ``begin_microbatch``, forward, backward; then
    the phases ``reduce``, norm, step (both in the optimizer), ``gather``.
    """

    model: nn.Module
    slices: list[MainSlice]
    """In the order in which forward needs the weights."""
    backend: Backend = "reference"
    """What computes routed experts and the optimizer's step."""
    dispatcher_choice: DispatcherChoice | None = None
    """How MoE layers reach their experts; ``None`` for a model without MoE layers."""

    @abstractmethod
    def begin_window(self) -> None:
        """Forget the gradients of the last window."""

    @abstractmethod
    def begin_microbatch(self, *, last: bool) -> None:
        """Before each forward; ``last`` in the window's last micro-batch."""

    @abstractmethod
    def reduce(self) -> None:
        """Sum the window's gradients over the ranks, into the slices."""

    @abstractmethod
    def gather(self, index: int) -> None:
        """Start to bring a slice's updated weights into every rank's model.

        A forward waits for them where it needs them.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait for all gathers: before anything but a forward reads or writes the weights."""

    def check(self) -> None:
        """See whether a transport has waited for a peer in vain; waits for the device.

        :raises LostPeerError: where one has.
        """
        if self.dispatcher_choice is not None:
            self.dispatcher_choice.dispatcher.check()

    def close(self) -> None:
        """Free what the ranks share, mailboxes above all; the model is of no use afterwards.

        A process that ends frees it anyway.
        """
        if self.dispatcher_choice is not None:
            self.dispatcher_choice.dispatcher.close()

    def shards(self) -> list[ParameterShard]:
        """All parts of parameters that this rank owns, slice by slice."""
        return [shard for part in self.slices for shard in part.shards]
