"""Files of each rank in the run's folder: stack dumps of every rank, logs of ranks above 0.

``stacks/rank-N.txt`` gets the Python stacks of all threads each time that rank N receives SIGUSR2.
``logs/rank-N.log`` gets the standard output of rank N > 0, its reports of long waits, and the
traceback of its error. Errors still go to the console, too. Both files are appended to.
"""

import faulthandler
import os
import signal
import socket
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import TextIO

from olmo_shard.distributed.agree import on_every_rank
from olmo_shard.distributed.long_waits import long_waits
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import ConfigurationError

_STDERR = 2
"""File descriptor."""


@contextmanager
def rank_files(run_dir: Path, mesh: Mesh) -> Iterator[None]:
    """Write this rank's stacks and, on ranks above 0, its output to the run's folder. Collective.

    :param run_dir: the run's folder, which exists.
    :raises ConfigurationError: on every rank, if a rank cannot write its files.
    """
    rank = mesh.rank
    with ExitStack() as stack:
        start = f"{datetime.now():%Y-%m-%d %H:%M:%S} rank {rank} of {mesh.world_size}"
        header = f"{start}, process {os.getpid()} on {socket.gethostname()}, {mesh.device}"

        def opened(folder: str, ending: str) -> TextIO:
            """Open this rank's file in a folder of the run, and write the header."""
            file = stack.enter_context(_opened(run_dir / folder / f"rank-{rank}.{ending}"))
            print(header, file=file, flush=True)
            return file

        stacks = on_every_rank(mesh.control, lambda: opened("stacks", "txt"))
        log = on_every_rank(mesh.control, lambda: opened("logs", "log") if rank else None)

        # faulthandler writes in the signal handler itself: a blocked main thread delays nothing.
        faulthandler.register(signal.SIGUSR2, file=stacks)
        # Callbacks run in reverse order, so the signal goes to stderr before the file is closed.
        stack.callback(faulthandler.register, signal.SIGUSR2, file=_STDERR)
        # On rank 0 the console is the log.
        if log is not None:
            stack.enter_context(redirect_stdout(log))
            long_waits.log = log
            stack.callback(setattr, long_waits, "log", None)
        try:
            yield
        except BaseException:
            if log is not None:
                traceback.print_exc(file=log)
            raise


def _opened(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise ConfigurationError(f"run.dir: {path} cannot be written: {error.strerror}") from error
