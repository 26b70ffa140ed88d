"""The first cause of a failed run: which rank failed first, and why.

torch's ``record`` writes a rank's error to the file in TORCHELASTIC_ERROR_FILE. Both torchrun and
the local launcher set that variable.
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
    """How one rank ended. ``when`` is a time in seconds since 1970."""

    rank: int
    message: str
    when: float
    exit_code: int


def read_failure(path: Path, rank: int, exit_code: int) -> Failure:
    """Return the failure that a rank recorded, or one made from its exit code without a record.

    :param path: the rank's error file.
    """
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]["message"]
    except (OSError, json.JSONDecodeError):
        message = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        return Failure(rank=rank, message=message, when=time.time(), exit_code=exit_code)
    return Failure(rank=rank, message=message, when=path.stat().st_mtime, exit_code=exit_code)


def first_cause(failures: list[Failure], ended_well: Sequence[int] = ()) -> Failure:
    """Return the earliest failure that is more than the loss of a peer.

    :param ended_well: ranks that ended with exit code 0. If every failure is the loss of a peer,
        the first of these ranks left in the middle of the run, which is the cause.
    """
    first = min(failures, key=lambda failure: (is_lost_peer(failure.message), failure.when))
    if not ended_well or not is_lost_peer(first.message):
        return first
    # Every rank that failed lost a peer, and no peer failed by itself: one left without an error.
    message = (
        f"left in the middle of the run with exit code 0; rank {first.rank} says: {first.message}"
    )
    return replace(first, rank=ended_well[0], message=message)


def launcher_reports(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the local launcher will print this rank's error.

    torchrun also sets an error file, but prints its summary much later. torchrun's run id tells the
    two apart.
    """
    return ERROR_FILE in environ and "TORCHELASTIC_RUN_ID" not in environ


def is_lost_peer(message: str) -> bool:
    """Return whether an error reports the loss of a peer: a consequence, not a cause."""
    return any(mark in message.lower() for mark in _LOST_PEER)
