"""The local launcher: starts N ranks on this host, and ends all of them when one fails."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from olmo_shard.distributed.failure import (
    ERROR_FILE,
    Failure,
    first_cause,
    is_lost_peer,
    read_failure,
)

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""
_SETTLE_SECONDS = 1.0
"""Time after a first failure in which the rank that caused it can end, too."""


def launch_local(arguments: list[str], nproc: int) -> int:
    """Run ``python -m olmo_shard ARGUMENTS`` as ranks 0 to nproc - 1 on this host.

    This process serves the store at a free port, so two jobs never collide. If a rank fails, the
    others are ended, and the first cause is printed last. SIGUSR2 is forwarded to all ranks, which
    dump their stacks.

    :returns: exit code: 0, or that of the rank that failed first.
    """
    # Imported late: the command line starts faster without torch.
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="olmo_shard-") as folder:
        error_files = [Path(folder) / f"rank{rank}.json" for rank in range(nproc)]
        # A rank inherits that SIGUSR2 is ignored, until it has a handler of its own.
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        ranks = [
            _start(arguments, rank, nproc, store.port, error_files[rank]) for rank in range(nproc)
        ]
        signal.signal(signal.SIGUSR2, lambda number, _: _send(ranks, number))
        try:
            codes = _watch(ranks)
        except KeyboardInterrupt:
            _end(ranks)
            print("olmo-shard: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        finally:
            _end(ranks)
            signal.signal(signal.SIGUSR2, before)
        failures = [
            read_failure(error_files[rank], rank, code) for rank, code in codes.items() if code
        ]
    return _report(failures, codes, nproc) if failures else 0


def _report(failures: list[Failure], codes: dict[int, int], nproc: int) -> int:
    """Print the first cause, and the ranks that gave no answer; return the exit code.

    :param codes: exit codes of the ranks that ended by themselves.
    """
    # Ranks that share one mistake, such as a wrong config, all fail with one message.
    first = first_cause(failures, [rank for rank, code in codes.items() if code == 0])
    all_equal = len(failures) == nproc and len({failure.message for failure in failures}) == 1
    who = f"all {nproc} ranks failed" if all_equal else f"rank {first.rank} of {nproc} failed first"
    print(f"olmo-shard: {who}: {first.message}", file=sys.stderr)
    silent = sorted(set(range(nproc)) - codes.keys())
    if silent and is_lost_peer(first.message):
        print(f"olmo-shard: no answer from rank(s) {silent}, still running", file=sys.stderr)
    return first.exit_code if first.exit_code > 0 else 128 - first.exit_code


def _start(
    arguments: list[str], rank: int, nproc: int, port: int, error_file: Path
) -> subprocess.Popen[bytes]:
    # The variables of torchrun, which the rank reads as it would under torchrun.
    environ = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        ERROR_FILE: str(error_file),
    }
    command = [sys.executable, "-m", "olmo_shard.distributed.local_rank", *arguments]
    return subprocess.Popen(command, env=environ, stdin=subprocess.PIPE)


def _watch(ranks: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Wait until all ranks end well or one fails; return the exit codes of those that ended."""
    while True:
        # Exit code 0 of some ranks is no failure: the others may still be at the end of the run.
        codes = _ended(ranks)
        if any(codes.values()):
            time.sleep(_SETTLE_SECONDS)
            return _ended(ranks)
        if len(codes) == len(ranks):
            return codes
        time.sleep(_POLL_SECONDS)


def _ended(ranks: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    return {rank: p.returncode for rank, p in enumerate(ranks) if p.poll() is not None}


def _send(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in ranks:
        process.send_signal(number)  # does nothing if the process has ended


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End all ranks: SIGTERM first, SIGKILL for those that are still there after a while."""
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
