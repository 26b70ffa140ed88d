"""Termination by SIGINT, SIGTERM and SIGHUP: at once, also during native code."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupted(BaseException):
    """Unwinds the main thread. Like ``KeyboardInterrupt`` it is not an ``Exception``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a signal unwind the block, print one line, and end the process with 128 + its number.

    Signals that the process ignores, such as SIGHUP under nohup, stay ignored.
    """
    earlier = {number: signal.getsignal(number) for number in _SIGNALS}
    caught = [number for number, handler in earlier.items() if handler is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, lambda received, _: _interrupt(received, caught))
    try:
        yield
    except _Interrupted as interrupted:
        name = signal.Signals(interrupted.number).name
        print(f"olmo-shard: interrupted by {name}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # A thread in native code cannot be joined, and must not run while Python shuts down.
        os._exit(128 + interrupted.number)
    finally:
        for number in caught:
            signal.signal(number, earlier[number])


def _interrupt(received: int, caught: list[signal.Signals]) -> None:
    """Unwind the main thread, and ignore further signals."""
    # A second signal must not interrupt the removal of temporary files.
    for number in caught:
        signal.signal(number, signal.SIG_IGN)
    raise _Interrupted(received)


def call_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in another thread, so that this thread can handle signals meanwhile.

    Python runs signal handlers in the main thread only, between two of its instructions. A main
    thread that is in native code does not handle signals.

    :returns: the function's result; an exception of the function is raised here.
    """
    future: Future[T] = Future()

    def run() -> None:
        """Complete the future with the function's result or exception."""
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result()
