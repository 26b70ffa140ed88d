"""Which host a process runs on."""

import os
from pathlib import Path


def host_identity() -> tuple[str, int]:
    """Boot id and process namespace: equal on ranks that can see each other's processes.

    :raises OSError: where ``/proc`` has neither.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot_id, os.stat("/proc/self/ns/pid").st_ino
