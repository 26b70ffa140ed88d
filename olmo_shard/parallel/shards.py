"""The view of a parallel model that the optimizer and the checkpoint have, in either mode.

[Note: owned slices] Three nouns:

- A *logical parameter* is a parameter as a model on one device has it, all routed experts included.
- A *shard* is the part of one logical parameter that one rank owns: some contiguous ranges of the
  flattened logical parameter. Parts of flat buckets, FSDP2's shards and stacked experts that are
  spread over ranks all have this form.
- An *owned slice* is one flat FP32 tensor of main weights with the shards of one or more
  parameters. The optimizer updates a slice at once. Every element of the model is in exactly one
  owned slice of one rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from olmo_shard.kernels.backend import Backend
from olmo_shard.parallel.dispatchers import DispatcherChoice


@dataclass(frozen=True, kw_only=True)
class LogicalParameter:
    """A parameter as the whole run sees it."""

    name: str
    """Name in the model on one device, without the prefix of any wrapper."""
    shape: torch.Size
    """Shape over all ranks: a stacked tensor of routed experts counts all E experts."""
    experts: range | None
    """Global ids of the routed experts in this rank's tensor; ``None`` for a dense parameter."""

    @property
    def local_offset(self) -> int:
        """Start of this rank's tensor in the flattened logical tensor, in elements."""
        return 0 if self.experts is None else self.experts.start * self.shape[1:].numel()


InitialValue = Callable[[LogicalParameter], Tensor]
"""Returns the FP32 initial value of this rank's tensor of a parameter, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """The part of a parameter that this rank owns, as a range of an owned slice."""

    name: str
    """Name of the logical parameter."""
    shape: torch.Size
    """Shape of the logical parameter."""
    chunks: tuple[tuple[int, int], ...]
    """(offset, length) pairs in the flattened logical parameter. The shard concatenates them."""
    start: int
    """First element of the shard in the owned slice."""

    @property
    def numel(self) -> int:
        """Number of elements of the shard."""
        return sum(length for _, length in self.chunks)

    def of(self, flat: Tensor) -> Tensor:
        """This shard's range of a tensor [n] that is as long as the owned slice."""
        return flat[self.start : self.start + self.numel]


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedSlice(ABC):
    """Main weights that only this rank owns and that the optimizer updates at once."""

    main: Tensor
    """FP32 [n]: main weights."""
    model_copy: Tensor | None
    """[n] in compute precision: this slice of the model's own weights. ``None`` in FP32, where
    ``main`` is that part of the model."""
    shards: tuple[ParameterShard, ...]
    """Shards in the order of their starts. The gaps between them are padding and always zero."""

    @property
    def model_weights(self) -> Tensor:
        """[n] in compute precision: this slice of the weights that the model computes with."""
        # The input of the all-gather, also in FP32.
        return self.main if self.model_copy is None else self.model_copy

    @abstractmethod
    def gradient(self) -> Tensor:
        """FP32 [n]: the gradient, summed over the ranks; valid after ``ParallelModel.reduce``."""

    def update_model(self) -> None:
        """Round the main weights to compute precision, into the model; does nothing in FP32."""
        if self.model_copy is not None:
            self.model_copy.copy_(self.main)


class ParallelModel(ABC):
    """A model whose gradients are summed over the ranks and whose main weights are sharded.

    One step is: ``begin_window``; ``begin_microbatch``, forward and backward for each micro-batch;
    then the phases ``reduce``, norm and step (both in the optimizer), and ``gather``.
    """

    model: nn.Module
    parameters: list[LogicalParameter]
    """All parameters of the run in order of definition, also those without a shard on this rank."""
    slices: Sequence[OwnedSlice]
    """This rank's slices in the order in which forward needs their weights."""
    backend: Backend
    """Back end that computes routed experts and the update of the weights."""
    dispatcher_choice: DispatcherChoice | None = None
    """How MoE layers reach their experts; ``None`` for a model without MoE layers."""

    @abstractmethod
    def begin_window(self) -> None:
        """Drop the gradients of the last accumulation window."""

    @abstractmethod
    def begin_microbatch(self, *, last: bool) -> None:
        """Prepare for a forward and its backward; ``last`` in the window's last micro-batch."""

    @abstractmethod
    def reduce(self) -> None:
        """Sum the window's gradients over the ranks, into the gradients of the slices."""

    @abstractmethod
    def gather(self, owned: OwnedSlice) -> None:
        """Start to send a slice's updated weights to every rank's model.

        A forward waits for the weights before the module that reads them.
        """

    @abstractmethod
    def wait_for_weights(self) -> None:
        """Wait for all gathers. Call it before anything but a forward reads the model's weights."""

    @abstractmethod
    def release_gathered_weights(self) -> None:
        """Free whole weights that are kept for the next forward, where a mode keeps such copies.

        Call it before the main weights are read or written outside of a step: by a load, the copies
        would be out of date.
        """

    def raise_if_peer_lost(self) -> None:
        """Raise if an exchange of token rows has waited for a peer in vain. Synchronises.

        :raises LostPeerError: naming the peer.
        """
        if self.dispatcher_choice is not None:
            self.dispatcher_choice.dispatcher.check()

    def close(self) -> None:
        """Free the memory that ranks share, such as mailboxes. The model is unusable afterwards.

        The kernel frees the memory of a process that ends without this call.
        """
        if self.dispatcher_choice is not None:
            self.dispatcher_choice.dispatcher.close()

    def shards(self) -> list[ParameterShard]:
        """All shards that this rank owns, slice by slice."""
        return [shard for owned in self.slices for shard in owned.shards]
