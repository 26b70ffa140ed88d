"""Which rank failed first, and why.

A rank's error is written by torch's ``record`` to the file that the launcher named
(TORCHELASTIC_ERROR_FILE), torchrun's and the local one alike.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_LOST_PEER = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "timed out waiting",
    "lost a peer",
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    rank: int
    message: str
    when: float
    exit_code: int


def read_failure(path: Path, rank: int, exit_code: int) -> Failure:
    """The recorded failure of a rank, or what its exit code says if it could not write one."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]["message"]
    except (OSError, json.JSONDecodeError):
        how = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        return Failure(rank=rank, message=how, when=time.time(), exit_code=exit_code)
    return Failure(rank=rank, message=message, when=path.stat().st_mtime, exit_code=exit_code)


def first_cause(failures: list[Failure], ended_well: Sequence[int] = ()) -> Failure:
    """The earliest failure that is not just the loss of a peer.

    :param ended_well: ranks that ended with exit code 0. Where every failure is the loss of a peer,
        the first of these ranks left in the middle of the run, and that is the cause.
    """
    first = min(failures, key=lambda failure: (is_lost_peer(failure.message), failure.when))
    if not ended_well or not is_lost_peer(first.message):
        return first
    message = (
        f"left in the middle of the run with exit code 0; rank {first.rank} says: {first.message}"
    )
    return replace(first, rank=ended_well[0], message=message)


def launcher_reports(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this rank's error will be printed by the local launcher.

    torchrun names an error file too, but it also gives a run id, and prints its summary much later.
    """
    return ERROR_FILE in environ and "TORCHELASTIC_RUN_ID" not in environ


def is_lost_peer(message: str) -> bool:
    """Whether an error says that a peer went away: a consequence, not a cause."""
    return any(mark in message.lower() for mark in _LOST_PEER)
