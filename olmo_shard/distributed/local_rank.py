"""Entry point of a rank that the local launcher starts: ``olmo_shard``, ended with the launcher.

The launcher holds the other end of standard input and never writes to it. When the launcher ends,
even by SIGKILL, the kernel closes that end, and the rank's read returns.
"""

import faulthandler
import os
import runpy
import shutil
import signal
import threading
from pathlib import Path

from olmo_shard.distributed.failure import ERROR_FILE


def _end_with_launcher() -> None:
    os.read(0, 1)
    # A launcher that was killed could not remove its temporary folder.
    shutil.rmtree(Path(os.environ[ERROR_FILE]).parent, ignore_errors=True)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    # Before the slow imports: the launcher may forward SIGUSR2 at any time.
    faulthandler.register(signal.SIGUSR2)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    runpy.run_module("olmo_shard", run_name="__main__", alter_sys=True)
