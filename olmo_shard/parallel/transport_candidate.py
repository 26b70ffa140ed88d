"""A way in which token rows can travel between ranks, before it is chosen."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from olmo_shard.config import ParallelConfig
from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout, mailbox_layout
from olmo_shard.dispatch.transport import Transport
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.kernels.backend import Backend


@dataclass(frozen=True, kw_only=True)
class DispatchRequest:
    """What is known of a run when its transport is chosen."""

    parallel: ParallelConfig
    num_experts: int
    """Number of routed experts per layer."""
    top_k: int
    """Number of experts per token."""
    width: int
    """Width of the model."""
    max_tokens: int | None
    """Largest number of tokens per rank and micro-batch; ``None`` if it is not known."""
    device_type: str
    """``cpu`` or ``cuda``."""
    backend: Backend
    """Back end that computes the routed experts."""

    def mailbox_layout(self) -> MailboxLayout:
        """The mailboxes that a rowwise transport needs."""
        assert self.max_tokens is not None
        return mailbox_layout(
            num_experts=self.num_experts,
            top_k=self.top_k,
            width=self.width,
            dtype=getattr(torch, self.parallel.compute_dtype),
            num_ranks=self.parallel.expert_parallel,
            max_tokens=self.max_tokens,
            capacity_factor=self.parallel.capacity_factor,
        )


class TransportCandidate(ABC):
    """A transport that a run may use. ``dispatchers.py`` lists the candidates in order."""

    name: ClassVar[str]
    """Value of ``parallel.dispatch`` that selects the candidate."""

    @abstractmethod
    def applies_to(self, request: DispatchRequest) -> bool:
        """Whether the candidate is made for the run's device and its number of ranks."""

    def problem(self, request: DispatchRequest, ranks_on_host: int | None = None) -> str | None:
        """Why the candidate cannot run on this machine; ``None`` if nothing is missing.

        Does not communicate.

        :param ranks_on_host: number of ranks that will share the memory of this host. ``None`` if
            the run has started: ``create`` then checks the memory of all hosts.
        """
        return None

    def describe(self, request: DispatchRequest, ranks_on_host: int) -> str:
        """One line for ``olmo-shard check``: how the rows would travel."""
        return self.name

    @abstractmethod
    def create(self, request: DispatchRequest, mesh: Mesh) -> tuple[Transport, str]:
        """Create the transport; collective over all ranks.

        :returns: the transport, and a note on its memory for the log (may be empty).
        :raises HeapError: on all ranks, if one of them cannot have it.
        """


def max_tokens_problem(request: DispatchRequest) -> str | None:
    """Why mailboxes cannot be sized; ``None`` if they can."""
    if request.max_tokens is None:
        return "parallelize got no max_tokens, by which mailboxes are sized"
    return None
