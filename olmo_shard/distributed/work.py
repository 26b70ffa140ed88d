"""Collectives under way, beside the computation.

On a CPU gloo's own threads move the bytes, and waiting blocks the caller. On CUDA a stream does:
waiting makes the current stream wait, and never the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist

from olmo_shard.distributed.comm_stats import comm_stats


class _Waitable(Protocol):
    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...


class Work:
    """A collective that was started.

    :param work: what to wait for, as a rule what the backend returned; null if there is nothing.
    :param finish: what is left to do locally once the bytes are there.
    :param layer: to which the wait belongs, if to one.
    """

    def __init__(
        self,
        kind: str,
        device: torch.device,
        work: _Waitable | None = None,
        finish: Callable[[], object] | None = None,
        layer: int | None = None,
    ) -> None:
        self.kind, self.device, self.layer = kind, device, layer
        self._work, self._finish = work, finish
        if work is not None:
            _under_way.add(self)

    def is_ready(self) -> bool:
        """Whether ``wait`` would not keep the host waiting."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Wait, which counts as exposed time, and finish. A second call does nothing."""
        if self._work is not None:
            with comm_stats.waiting(self.kind, self.device, self.layer):
                self._await()
        self.wait_untimed()

    def wait_untimed(self) -> None:
        """``wait``, uncounted: for waits beside the computation."""
        self._await()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def _await(self) -> None:
        work, self._work = self._work, None
        _under_way.discard(self)
        if work is not None:
            work.wait()


_under_way: set[Work] = set()


def wait_for_all_work() -> None:
    """Complete whatever this process has started: before it leaves its peers."""
    for work in list(_under_way):
        work.wait_untimed()


class CommStream:
    """Starts collectives in the order of the calls, beside the computation.

    On CUDA all of them run on one stream of their own, whatever their groups: two ranks that ran
    two communicators' kernels in different orders could wait for each other for ever.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, launch: Callable[[], Work]) -> Work:
        """Start what ``launch`` starts, after all that was computed so far."""
        if self.stream is None:
            return launch()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work = launch()
            work.wait_untimed()
            return Work(work.kind, work.device, _OnStream(self.stream.record_event()))


@dataclass(frozen=True)
class _OnStream:
    """Everything up to an event."""

    done: torch.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)

    def is_completed(self) -> bool:
        """Always: the host has nothing to wait for."""
        return True


class AllOf:
    """Several sends and receives of gloo, as one."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works
        self._waiter: Thread | None = None
        self._error: RuntimeError | None = None
        self._arrived = False

    def wait(self) -> None:
        if self._waiter is None:
            self._wait_for_each()
            return
        self._waiter.join()
        if self._error is not None:
            raise self._error
        assert self._arrived

    def is_completed(self) -> bool:
        """Gloo's sends and receives say it only once they were awaited: so a thread does that."""
        if self._waiter is None:
            # A daemon: it never keeps a rank that fails from leaving.
            self._waiter = Thread(target=self._keep_error, daemon=True)
            self._waiter.start()
        return not self._waiter.is_alive()

    def _keep_error(self) -> None:
        try:
            self._wait_for_each()
        except RuntimeError as error:
            self._error = error

    def _wait_for_each(self) -> None:
        for work in self._works:
            work.wait()
        self._arrived = True
