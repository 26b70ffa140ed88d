"""A rank that the local launcher started: the same program, which ends when the launcher does.

The launcher holds the other end of standard input and never writes. However it ends, even by
SIGKILL, the kernel closes that end, and the rank sees it.
"""

import os
import runpy
import shutil
import signal
import threading
from pathlib import Path

from olmo_shard.distributed.failure import ERROR_FILE


def _end_with_launcher() -> None:
    os.read(0, 1)
    # A launcher that was killed cannot remove its temporary folder, and no process reads it now.
    shutil.rmtree(Path(os.environ[ERROR_FILE]).parent, ignore_errors=True)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    runpy.run_module("olmo_shard", run_name="__main__", alter_sys=True)
