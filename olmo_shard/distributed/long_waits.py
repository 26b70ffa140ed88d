"""Reports of long waits: one line that names the ranks which a waiting rank waits for.

[Note: long waits] Code that blocks the host registers its wait by ``long_waits.watch``. A thread of
the process looks at the registered waits about once per second.

- After half of ``report_after`` seconds the rank is published in the store as waiting.
- After ``report_after`` seconds the thread reports the wait, once. The line names those of the
  awaited ranks that do not wait themselves: one of them holds up the others.

The line goes to the rank's log. The lowest rank that waits also prints the line on the console, so
a hang of a large run costs one line there and not one per rank. A rank publishes its wait well
before any rank reports, since ranks do not begin to wait at the same moment.

Waits of a CUDA stream block no host thread and are not seen here.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import TextIO, TypeVar

import torch.distributed as dist

T = TypeVar("T")

REPORT_AFTER_SECONDS = 30.0
_STORE_SECONDS = 5.0
"""Longest time that the thread gives the store to answer; its server may be the rank that hangs."""


@dataclass(eq=False)
class _Wait:
    what: str
    awaited: Callable[[], Sequence[int]]
    begun: float
    reported: bool = False
    on_console: bool = False


class LongWaits:
    """Watches the waits of this process.

    :param report_after: seconds after which a wait is reported.
    :ivar log: file that gets the reports, beside the console; ``None`` before the run's folder is
        open, and on rank 0, whose log is the console.
    """

    def __init__(self, report_after: float = REPORT_AFTER_SECONDS) -> None:
        self.report_after = report_after
        self.log: TextIO | None = None
        self._rank, self._limit = 0, ""
        self._store: dist.Store | None = None
        self._keys: list[str] = []
        self._published = False
        self._waits: list[_Wait] = []
        self._lock = Lock()
        self._stop = Event()
        self._thread: Thread | None = None

    def start(self, rank: int, timeout_seconds: float) -> None:
        """Start the thread that looks at the waits.

        :param rank: this rank in the world.
        :param timeout_seconds: time limit of every wait, for the text of a report.
        """
        self._rank, self._limit = rank, f"run.timeout_seconds = {timeout_seconds:g}"
        self._stop.clear()
        self._thread = Thread(target=self._look_until_stopped, name="long waits", daemon=True)
        self._thread.start()

    def share(self, store: dist.Store, world_size: int) -> None:
        """Let the ranks see which of them wait.

        Every rank calls this before any rank can wait for ``report_after`` seconds: a report reads
        the keys of all ranks.
        """
        self._keys = [f"waiting/{rank}" for rank in range(world_size)]
        store.set(self._keys[self._rank], "")
        # A store's client serves one request at a time; a blocked main thread may hold the first.
        self._store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (no stub)

    def stop(self) -> None:
        """End the thread; waits are no longer reported."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1)
        self._thread = self._store = self.log = None
        self._published = False

    @contextmanager
    def watch(self, what: str, awaited: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Report the code inside if it takes long.

        :param what: noun phrase for the report, such as ``reduce, layer 7``.
        :param awaited: returns the ranks, in the world, whose part is missing or may be. It runs in
            the reporting thread, and never after the context has ended.
        """
        wait = _Wait(what, awaited, time.monotonic())
        with self._lock:
            self._waits.append(wait)
        try:
            yield
        finally:
            with self._lock:
                self._waits.remove(wait)
            if wait.reported:
                seconds = time.monotonic() - wait.begun
                line = f"rank {self._rank} stopped waiting after {seconds:.0f} s: {what}"
                self._write(line, console=wait.on_console)

    def _look_until_stopped(self) -> None:
        while not self._stop.wait(min(1.0, self.report_after / 10)):
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        # The lock keeps `awaited` from running after its wait has ended.
        with self._lock:
            longest = max((now - wait.begun for wait in self._waits), default=0.0)
            due = [
                (wait, list(wait.awaited()))
                for wait in self._waits
                if not wait.reported and now - wait.begun >= self.report_after
            ]
            for wait, _ in due:
                wait.reported = True
        # The store may be slow: no lock is held that a finished wait would need.
        self._publish(longest >= self.report_after / 2)
        for wait, ranks in due:
            self._report(wait, ranks, now - wait.begun)

    def _publish(self, waits: bool) -> None:
        if waits != self._published:
            self._published = waits
            self._ask(lambda store: store.set(self._keys[self._rank], "waits" if waits else ""))

    def _report(self, wait: _Wait, ranks: list[int], seconds: float) -> None:
        # Without the store's answer every awaited rank is a suspect, and this rank prints.
        values = self._ask(lambda store: store.multi_get(self._keys)) or []
        waiting = {rank for rank, value in enumerate(values) if value} | {self._rank}
        others = [rank for rank in ranks if rank != self._rank]
        suspects = [rank for rank in others if rank not in waiting]
        named = f"rank(s) {', '.join(map(str, suspects or others))}" if others else "other ranks"
        also = ", which wait as well" if others and not suspects else ""
        wait.on_console = self._rank == min(waiting)
        line = (
            f"rank {self._rank} has waited {seconds:.0f} s for {named}{also}: {wait.what} "
            f"({self._limit})"
        )
        self._write(line, console=wait.on_console)

    def _write(self, line: str, *, console: bool) -> None:
        if self.log is not None:
            print(line, file=self.log, flush=True)
        if console:
            print(line, file=sys.stderr, flush=True)

    def _ask(self, request: Callable[[dist.Store], T]) -> T | None:
        """The store's answer; ``None`` without a store, or if it fails or does not answer."""
        store, answers = self._store, []
        if store is None:
            return None

        def ask() -> None:
            """Put the answer in ``answers``, if there is one."""
            try:
                answers.append(request(store))
            except RuntimeError:  # the store's server has ended
                self._store = None

        thread = Thread(target=ask, name="long waits: store", daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        # A request that is still open may never return: make no other one.
        if thread.is_alive():
            self._store = None
        return answers[0] if answers else None


long_waits = LongWaits()
"""The waits of this process; ``runtime`` starts and stops the reports."""
