"""Handles of collectives that run beside the computation.

On a CPU gloo's threads move the bytes, and ``wait`` blocks the calling thread. On CUDA a stream
moves them, and ``wait`` makes the current stream wait; the host never blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist

from olmo_shard.distributed.comm_stats import comm_stats
from olmo_shard.distributed.long_waits import long_waits


class _Waitable(Protocol):
    """What ``Work`` needs of a backend's handle."""

    def wait(self) -> object:
        """Complete, or make the current stream wait."""
        ...

    def is_completed(self) -> bool:
        """Return whether ``wait`` would not block the host."""
        ...


class Work:
    """A collective that was started.

    :param kind: name under which ``comm_stats`` counts the wait.
    :param work: the backend's handle; ``None`` if there is nothing to wait for.
    :param finish: local work to do once the bytes have arrived.
    :param layer: MoE layer that the wait is counted for, if any.
    :param group: the ranks that take part, for reports of long waits.
    """

    def __init__(
        self,
        kind: str,
        device: torch.device,
        work: _Waitable | None = None,
        finish: Callable[[], object] | None = None,
        layer: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.kind, self.device, self.layer, self.group = kind, device, layer, group
        self._work, self._finish = work, finish
        if work is not None:
            _outstanding.add(self)

    def is_ready(self) -> bool:
        """Return whether ``wait`` would return without blocking the host."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Wait for the collective and finish it. The wait counts as exposed time.

        Calling it again does nothing.
        """
        if self._work is not None:
            with comm_stats.waiting(self.kind, self.device, self.layer):
                self._wait_for_backend()
        self.wait_untimed()

    def wait_untimed(self) -> None:
        """Like ``wait``, but not counted: for waits that hold up no computation."""
        self._wait_for_backend()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def _wait_for_backend(self) -> None:
        work, self._work = self._work, None
        _outstanding.discard(self)
        if work is None:
            return
        # On CUDA `wait` only queues an event, so a report of a long wait never comes from here.
        layer = "" if self.layer is None else f", layer {self.layer}"
        with long_waits.watch(f"{self.kind}{layer}", self._ranks):
            work.wait()

    def _ranks(self) -> list[int]:
        return [] if self.group is None else dist.get_process_group_ranks(self.group)


_outstanding: set[Work] = set()


def wait_for_all_work() -> None:
    """Complete all collectives that this process has started.

    Call it before the process leaves its peers: they may still depend on this rank's part.
    """
    for work in list(_outstanding):
        work.wait_untimed()


class CommStream:
    """Starts collectives in the order of the calls, beside the computation.

    On CUDA all collectives run on one side stream, whatever their groups. Two ranks that ran the
    kernels of two communicators in different orders could deadlock.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, launch: Callable[[], Work]) -> Work:
        """Call ``launch`` on the stream, ordered after all work queued on the current stream.

        :param launch: starts one collective and returns its handle.
        """
        if self.stream is None:
            return launch()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work = launch()
            # This makes the side stream wait, so the event below marks the end of the collective.
            work.wait_untimed()
            return Work(work.kind, work.device, _StreamEvent(self.stream.record_event()))


@dataclass(frozen=True)
class _StreamEvent:
    """All work of a stream up to a recorded event."""

    done: torch.Event

    def wait(self) -> None:
        """Make the current stream wait for the event."""
        torch.cuda.current_stream().wait_event(self.done)

    def is_completed(self) -> bool:
        """Return true: waiting for an event never blocks the host."""
        return True


class AllOf:
    """Several sends and receives of gloo as one handle.

    Gloo reports the completion of a send or receive only to a caller that waits for it. So the
    first call of ``is_completed`` starts a thread that waits for all of them.
    """

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works
        self._waiter: Thread | None = None
        self._error: RuntimeError | None = None
        self._arrived = False

    def wait(self) -> None:
        """Block until all have completed.

        :raises RuntimeError: where one of them has failed.
        """
        if self._waiter is None:
            self._wait_for_each()
            return
        self._waiter.join()
        if self._error is not None:
            raise self._error
        assert self._arrived

    def is_completed(self) -> bool:
        """Return whether all have completed or one has failed; does not block."""
        if self._waiter is None:
            # A daemon thread never keeps a failing rank from leaving.
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
