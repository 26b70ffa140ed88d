"""Memory that a process can still allocate on this host (Linux)."""

from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class _Controller(NamedTuple):
    """File names of the memory controller in one version of control groups."""

    root: str
    limit: str
    used: str
    reclaimable: str
    """Line of ``memory.stat``: bytes of file pages not used lately. The kernel frees them first."""


_V2 = _Controller("", "memory.max", "memory.current", "inactive_file")
_V1 = _Controller("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory() -> int:
    """Return the available bytes: the kernel's estimate, or less within a limited control group."""
    return min([_available_on_host(), *_left_in_control_groups()])


def format_bytes(num_bytes: int) -> str:
    """Format a size for a message: ``3,221,225 bytes (3.1 MiB)``."""
    powers = {"GiB": 30, "MiB": 20, "KiB": 10}
    unit = next((name for name, power in powers.items() if num_bytes >= 2**power), "KiB")
    return f"{num_bytes:,} bytes ({num_bytes / 2 ** powers[unit]:.1f} {unit})"


def _available_on_host() -> int:
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.removesuffix("kB")) * 1024
    raise AssertionError(f"{_MEMINFO} has no MemAvailable")


def _left_in_control_groups() -> list[int]:
    """Bytes left in each limited control group of this process and in each group around it."""
    left_in_groups: list[int] = []
    for line in _CGROUP.read_text(encoding="utf-8").splitlines():
        # `0::/path` in version 2; `4:memory:/path`, one line per controller, in version 1.
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        controller = _V1 if controllers else _V2
        root = _CGROUP_ROOT / controller.root
        group = root / path.lstrip("/")
        groups = [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
        limits = (_left(folder, controller) for folder in groups)
        left_in_groups += [left for left in limits if left is not None]
    return left_in_groups


def _left(group: Path, controller: _Controller) -> int | None:
    """Bytes left in one control group; ``None`` without a limit."""
    try:
        limit = (group / controller.limit).read_text(encoding="ascii").strip()
        used = int((group / controller.used).read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii")
    except FileNotFoundError:  # the outermost group has no limit, and no such files
        return None
    if limit == "max":
        return None
    # The kernel drops cached file pages when memory is short, so they count as free.
    values = dict(line.split() for line in stat.splitlines())
    return max(0, int(limit) - used + int(values.get(controller.reclaimable, 0)))
