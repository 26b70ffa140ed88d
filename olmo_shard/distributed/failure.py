"""What a rank leaves behind when it fails, so that the launcher can show the first cause.

The file and its form are torchrun's (TORCHELASTIC_ERROR_FILE), so that both launchers read it.
"""

import json
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True, kw_only=True)
class Failure:
    rank: int
    message: str
    timestamp: float
    exit_code: int


def record_failure(error: BaseException, message: str) -> None:
    """Write the error where the launcher asked for it."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    details = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(time.time()),
    }
    text = json.dumps({"message": {"message": message, "extraInfo": details}})
    Path(path).write_text(text, encoding="utf-8")


def read_failure(path: Path, rank: int, exit_code: int) -> Failure:
    """The recorded failure of a rank, or what its exit code says if it had no time to write one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))["message"]
    except (OSError, json.JSONDecodeError):
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with {exit_code}"
        return Failure(rank=rank, message=how, timestamp=time.time(), exit_code=exit_code)
    timestamp = float(record["extraInfo"]["timestamp"])
    return Failure(rank=rank, message=record["message"], timestamp=timestamp, exit_code=exit_code)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of a collective says that a peer went away: a consequence, not a cause."""
    text = str(error).lower()
    marks = ("connection closed by peer", "connection reset", "broken pipe", "timed out waiting")
    return isinstance(error, RuntimeError) and any(mark in text for mark in marks)
