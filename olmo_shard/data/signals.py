"""SIGINT, SIGTERM and SIGHUP end a long computation at once, also inside of native code."""

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
    """Unwinds the main thread; like ``KeyboardInterrupt`` it is no ``Exception``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """A signal unwinds the block, prints one line and ends the process with 128 + its number.

    Signals that the process ignores, such as SIGHUP under nohup, stay ignored.
    """
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    caught = [each for each, handler in before.items() if handler is not signal.SIG_IGN]
    for each in caught:
        signal.signal(each, lambda number, _: _interrupt(number, caught))
    try:
        yield
    except _Interrupted as interrupted:
        name = signal.Signals(interrupted.number).name
        print(f"olmo-shard: interrupted by {name}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # A thread inside of native code cannot be joined, and must not outlive the interpreter.
        os._exit(128 + interrupted.number)
    finally:
        for each in caught:
            signal.signal(each, before[each])


def _interrupt(number: int, caught: list[signal.Signals]) -> None:
    # A second signal must not cut the removal of temporary files short.
    for each in caught:
        signal.signal(each, signal.SIG_IGN)
    raise _Interrupted(number)


def call_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in another thread, so that signals reach this one during native code.

    Python runs signal handlers only in the main thread, and only between its instructions: never
    while that thread is inside of native code.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result()
