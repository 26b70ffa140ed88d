"""The run's side of the tracker process: start it, feed it, and never wait for it for long."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from olmo_shard.train.tracking.messages import Opened, Request

_LOCAL_SECONDS = 120.0
"""Longest wait for what needs no server: starting the process, opening an offline segment."""
_MOST_MESSAGES = 100_000
"""Messages that may wait for the tracker process; with more, tracking ends."""
_GRACE_SECONDS = 2.0

Reply = dict[str, Any]


class TrackerProcess:
    """Runs ``client`` as a process, fed by a thread; none of the methods waits for W&B.

    Phases of the thread: open (a run that does not open online in ``init_seconds`` is opened
    offline), feed (messages wait in a queue until then), finish.

    :param log: file for what W&B's client prints.
    """

    def __init__(self, request: Request, log: Path) -> None:
        self._request, self._log = request, log
        self._messages: SimpleQueue[Reply | None] = SimpleQueue()
        self._replies: SimpleQueue[Reply | None] = SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._ended = False
        """Whether the run has given up the tracker process: no further one is started."""
        self._fed = threading.Event()
        self.news: SimpleQueue[Opened | str] = SimpleQueue()
        """The run that was opened, and the error that ended tracking."""
        self.finished = False
        self._thread = threading.Thread(target=self._supervise, name="tracker", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send(self, **message: Any) -> None:
        """Queue a message for the tracker process."""
        if self._ended:
            return
        if self._messages.qsize() >= _MOST_MESSAGES:
            self.news.put(f"{_MOST_MESSAGES} messages wait for W&B's client")
            self._kill()
        else:
            self._messages.put(message)

    def finish(self, exit_code: int = 0) -> None:
        """Finish the run, and end the tracker process in ``finish_seconds`` if it has not ended."""
        self._last(exit_code)
        self._thread.join(self._request.finish_seconds)
        self._kill()

    def leave(self) -> None:
        """Have the run finished as a failed one, without waiting for the tracker process."""
        self._last(1)
        self._fed.wait(_GRACE_SECONDS)

    def _last(self, exit_code: int) -> None:
        self._messages.put({"exit_code": exit_code})
        self._messages.put(None)

    def _supervise(self) -> None:
        error = self._open()
        if error and self._request.mode == "auto":
            self._request = dataclasses.replace(self._request, mode="offline", reason=error)
            error = self._open()
        if not error:
            error = self._feed()
        if error and not self._ended:
            self.news.put(error)
            self._kill()

    def _open(self) -> str | None:
        """Start the process and wait for its run; returns why there is none."""
        if not self._start():
            return "the run has ended"
        phase, seconds, server = "start", _LOCAL_SECONDS, ""
        while True:
            try:
                reply = self._replies.get(timeout=seconds)
            except Empty:
                self._stop()
                who = f"no answer from {server}" if server else f"W&B's client did not {phase}"
                return f"{who} within {seconds:g} s"
            if reply is None or "failed" in reply:
                self._stop()
                return reply["failed"] if reply else f"W&B's client ended (see {self._log})"
            if "choosing" in reply:
                server, seconds = reply["choosing"], self._request.init_seconds
            if reply.get("chosen") in ("offline", "disabled"):
                phase, seconds, server = "open a segment", _LOCAL_SECONDS, ""
            if "opened" in reply:
                self.news.put(Opened(**reply["opened"]))
                return None

    def _feed(self) -> str | None:
        """Pass messages on until the last one, then wait for the end; returns what went wrong."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            while (message := self._messages.get()) is not None:
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
            self._fed.set()
            self._process.stdin.close()
        except OSError:
            self._close_input()  # The process has ended; its last reply says why.
        last: Reply = {"failed": f"W&B's client ended (see {self._log})"}
        while (reply := self._replies.get()) is not None:
            last = reply  # and go on until the process ends: it still writes to disk
        self.finished = last.get("finished", False)
        return last.get("failed")

    def _start(self) -> bool:
        """Start a process and send it the request, unless the run has ended tracking."""
        with self._lock:
            if self._ended:
                return False
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "olmo_shard.train.tracking.client"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    # Ctrl-C at a terminal is for the run, which then ends its tracker process.
                    start_new_session=True,
                )
        self._replies = SimpleQueue()
        threading.Thread(
            target=_read, args=(self._process, self._replies), name="tracker replies", daemon=True
        ).start()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # If it has ended, `_open` sees the end of its replies.
            self._process.stdin.write(json.dumps(dataclasses.asdict(self._request)) + "\n")
            self._process.stdin.flush()
        return True

    def _stop(self) -> None:
        """Kill the process. W&B's service notices that it is gone, and ends too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._close_input()

    def _close_input(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _kill(self) -> None:
        with self._lock:
            self._ended = True
        self._stop()


def _read(process: subprocess.Popen[str], replies: SimpleQueue[Reply | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            replies.put(json.loads(line))
    replies.put(None)
