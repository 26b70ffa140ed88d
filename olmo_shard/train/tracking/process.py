"""The run's side of the tracker process: it starts, feeds and ends the process."""

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
"""Longest wait in seconds for steps without a server: process start, opening of a segment."""
_MOST_MESSAGES = 100_000
"""Largest number of queued messages. One more ends tracking."""
_GRACE_SECONDS = 2.0
"""Longest wait in seconds for the last messages to be written after a failure."""

Reply = dict[str, Any]
"""A message or a reply: JSON values by name."""


class TrackerProcess:
    """The process that runs ``client``, and a thread that feeds it.

    Only ``finish`` waits for W&B, for a limited time. The thread goes through three phases:

    1. open: start the process and open the W&B run. If it does not open online within
       ``init_seconds``, another process opens it offline.
    2. feed: pass on messages, which wait in a queue until then.
    3. finish: wait for the end of the process.

    :param request: the W&B run to open.
    :param log: file for the output of W&B's client.
    """

    def __init__(self, request: Request, log: Path) -> None:
        self._request, self._log = request, log
        self._messages: SimpleQueue[Reply | None] = SimpleQueue()
        self._replies: SimpleQueue[Reply | None] = SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._ended = False
        """Whether the run has ended tracking, so that no other process may start."""
        self._fed = threading.Event()
        """Set when all messages have been written to the process."""
        self.news: SimpleQueue[Opened | str] = SimpleQueue()
        """Events for the run: the W&B run was opened, or an error has ended tracking."""
        self.finished = False
        """Whether W&B has received or stored everything."""
        self._thread = threading.Thread(target=self._supervise, name="tracker", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def send(self, **message: Any) -> None:
        """Queue a message for the tracker process. Does not wait."""
        if self._ended:
            return
        # A client that hangs must not fill the memory of rank 0.
        if self._messages.qsize() >= _MOST_MESSAGES:
            self.news.put(f"{_MOST_MESSAGES} messages wait for W&B's client")
            self._kill()
        else:
            self._messages.put(message)

    def finish(self, exit_code: int = 0) -> None:
        """Finish the W&B run. After ``finish_seconds`` the tracker process is ended."""
        self._last(exit_code)
        self._thread.join(self._request.finish_seconds)
        self._kill()

    def leave(self) -> None:
        """Finish the W&B run as failed, without waiting for the tracker process to end."""
        self._last(1)
        self._fed.wait(_GRACE_SECONDS)

    def _last(self, exit_code: int) -> None:
        """Queue the last message."""
        self._messages.put({"exit_code": exit_code})
        self._messages.put(None)

    def _supervise(self) -> None:
        """Go through the phases; the body of the thread."""
        # 1. Open online. After an error, a second process opens the run offline.
        error = self._open()
        if error and self._request.mode == "auto":
            self._request = dataclasses.replace(self._request, mode="offline", reason=error)
            error = self._open()
        # 2. and 3. Feed and finish.
        if not error:
            error = self._feed()
        if error and not self._ended:
            self.news.put(error)
            self._kill()

    def _open(self) -> str | None:
        """Start the process and wait until its W&B run is open; returns the error, if any."""
        if not self._start():
            return "the run has ended"
        # Each reply announces the next phase of the client, and thereby the limit of the next wait.
        phase, seconds, server = "start", _LOCAL_SECONDS, ""
        while True:
            try:
                reply = self._replies.get(timeout=seconds)
            except Empty:
                self._stop()
                problem = f"no answer from {server}" if server else f"W&B's client did not {phase}"
                return f"{problem} within {seconds:g} s"
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
        """Pass on messages, then wait for the end of the process; returns the error, if any."""
        assert self._process is not None
        assert self._process.stdin is not None
        # ``None`` in the queue marks the last message.
        try:
            while (message := self._messages.get()) is not None:
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
            self._fed.set()
            self._process.stdin.close()
        except OSError:
            self._close_input()  # The process has ended. Its last reply has the reason.
        last: Reply = {"failed": f"W&B's client ended (see {self._log})"}
        while (reply := self._replies.get()) is not None:
            last = reply  # Keep waiting after ``finished``: the process still writes to disk.
        self.finished = last.get("finished", False)
        return last.get("failed")

    def _start(self) -> bool:
        """Start a process and send it the request; ``False`` if the run has ended tracking."""
        # The lock orders this start and ``_kill``, which another thread calls.
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
                    # Ctrl-C at a terminal must reach the run only, which then ends the process.
                    start_new_session=True,
                )
        # A new queue: replies of an earlier process must not be read as this one's.
        self._replies = SimpleQueue()
        threading.Thread(
            target=_read, args=(self._process, self._replies), name="tracker replies", daemon=True
        ).start()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # After an early end, `_open` reads the end of replies.
            self._process.stdin.write(json.dumps(dataclasses.asdict(self._request)) + "\n")
            self._process.stdin.flush()
        return True

    def _stop(self) -> None:
        """Kill the process. W&B's service detects this and ends as well."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._close_input()

    def _close_input(self) -> None:
        """Close the process's standard input."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _kill(self) -> None:
        """End tracking: kill the process, and let no other one start."""
        with self._lock:
            self._ended = True
        self._stop()


def _read(process: subprocess.Popen[str], replies: SimpleQueue[Reply | None]) -> None:
    """Queue the replies of a process, and ``None`` at their end; the body of a thread."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            replies.put(json.loads(line))
    replies.put(None)
