"""Activation checkpointing of a block, with routing decided once.

A recompute that decided again could pick other experts where scores tie, and then the sizes of the
exchanges would differ between forward and backward. So a tape records the picks of the forward and
replays them in the recompute.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

_tape: ContextVar["RoutingTape | None"] = ContextVar("routing_tape", default=None)


class RoutingTape:
    """The routing decisions of one block in one micro-batch."""

    def __init__(self) -> None:
        self._decisions: list[Tensor] = []
        self._replayed: int | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        token = _tape.set(self)
        try:
            yield
        finally:
            _tape.reset(token)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """A recompute is ended early by an exception, once all that backward needs is there."""
        self._replayed = 0
        token = _tape.set(self)
        try:
            yield
        finally:
            _tape.reset(token)
            self._replayed = None

    def decide(self, choose: Callable[[], Tensor]) -> Tensor:
        if self._replayed is None:
            self._decisions.append(choose())
            return self._decisions[-1]
        self._replayed += 1
        return self._decisions[self._replayed - 1]


def decide_once(choose: Callable[[], Tensor]) -> Tensor:
    """The result of ``choose()``, or in a recompute what it was in the forward."""
    tape = _tape.get()
    return choose() if tape is None else tape.decide(choose)


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that keeps only its inputs and computes the rest again in backward."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        tape = RoutingTape()
        return tape.record(), tape.replay()

    def run(*args: Any) -> Any:
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )

    return run
