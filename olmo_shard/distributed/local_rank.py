"""A rank that the local launcher started: the same program, which ends when the launcher does.

The launcher holds the other end of standard input and never writes. However it ends, even by
SIGKILL, the kernel closes that end, and the rank sees it.
"""

import os
import runpy
import signal
import threading


def _end_with_launcher() -> None:
    os.read(0, 1)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    runpy.run_module("olmo_shard", run_name="__main__", alter_sys=True)
