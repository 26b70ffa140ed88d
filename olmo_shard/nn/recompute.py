"""Activation checkpointing of a block, with every routing decision made once.

A recompute that decided again could choose other experts where scores tie. The exchanges of
backward would then have other sizes than those of forward. So a tape records the decisions of the
forward and replays them in the recompute.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

_tape: ContextVar["RoutingTape | None"] = ContextVar("routing_tape", default=None)
"""The tape of the block that runs at present; ``None`` outside of checkpointed blocks."""


class RoutingTape:
    """The routing decisions of one block in one micro-batch, in the order of the forward."""

    def __init__(self) -> None:
        self._decisions: list[Tensor] = []
        self._replayed: int | None = None
        """Number of decisions that the recompute has replayed; ``None`` in the forward."""

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep the decisions that are made inside the context."""
        token = _tape.set(self)
        try:
            yield
        finally:
            _tape.reset(token)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Return the kept decisions inside the context, from the first one on."""
        self._replayed = 0
        token = _tape.set(self)
        # An exception ends a recompute early, when backward has all the tensors that it needs.
        try:
            yield
        finally:
            _tape.reset(token)
            self._replayed = None

    def decide(self, choose: Callable[[], Tensor]) -> Tensor:
        """The next decision: made and kept in a forward, replayed in a recompute."""
        if self._replayed is None:
            self._decisions.append(choose())
            return self._decisions[-1]
        self._replayed += 1
        return self._decisions[self._replayed - 1]


def decide_once(choose: Callable[[], Tensor]) -> Tensor:
    """The result of ``choose()``; in a recompute, its result in the forward."""
    tape = _tape.get()
    return choose() if tape is None else tape.decide(choose)


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that keeps only its inputs, and is run again in backward."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        tape = RoutingTape()
        return tape.record(), tape.replay()

    def run(*args: Any) -> Any:
        # Blocks draw no random numbers, so no generator state has to be kept.
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )

    return run
