"""Identity of the host that a process runs on."""

import os
from pathlib import Path


def host_identity() -> tuple[str, int]:
    """Return boot id and process namespace: equal on ranks that see each other's processes.

    :raises OSError: if ``/proc`` cannot be read.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot_id, os.stat("/proc/self/ns/pid").st_ino
