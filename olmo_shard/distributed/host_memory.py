"""How much memory a process could still take on this host."""

from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class _Controller(NamedTuple):
    """Where a version of control groups keeps what."""

    root: str
    limit: str
    used: str
    reclaimable: str
    """Line of ``memory.stat``: file pages that nobody has used lately are given up first."""


_V2 = _Controller("", "memory.max", "memory.current", "inactive_file")
_V1 = _Controller("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory() -> int:
    """Bytes: what the kernel thinks it can give, or less where a control group limits it.

    For Linux.
    """
    return min([_available_on_host(), *_left_in_control_groups()])


def format_bytes(num_bytes: int) -> str:
    """For a message: 3,221,225 bytes (3.1 MiB)."""
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
    """Of this process's groups and all groups around them."""
    found: list[int] = []
    for line in _CGROUP.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        controller = _V1 if controllers else _V2
        root = _CGROUP_ROOT / controller.root
        group = root / path.lstrip("/")
        places = [place for place in (group, *group.parents) if place.is_relative_to(root)]
        found += [left for place in places if (left := _left(place, controller)) is not None]
    return found


def _left(place: Path, controller: _Controller) -> int | None:
    try:
        limit = (place / controller.limit).read_text(encoding="ascii").strip()
        used = int((place / controller.used).read_text(encoding="ascii"))
        stat = (place / "memory.stat").read_text(encoding="ascii")
    except FileNotFoundError:  # the outermost group has no limit, and no such files
        return None
    if limit == "max":
        return None
    values = dict(line.split() for line in stat.splitlines())
    return max(0, int(limit) - used + int(values.get(controller.reclaimable, 0)))
