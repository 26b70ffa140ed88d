"""How much memory a process could still take on this host."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes: what the kernel thinks it can give, or less where a control group (v2) limits it.

    For Linux.
    """
    return min([_available_on_host(), *_left_in_control_groups()])


def in_units(num_bytes: int) -> str:
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
    """Of this process's group and all groups around it."""
    own = [line for line in _CGROUP.read_text(encoding="utf-8").splitlines() if line[:3] == "0::"]
    if not own:
        return []
    group = _CGROUP_ROOT / own[0].removeprefix("0::").lstrip("/")
    places = [place for place in (group, *group.parents) if place.is_relative_to(_CGROUP_ROOT)]
    return [left for place in places if (left := _left(place)) is not None]


def _left(place: Path) -> int | None:
    try:
        limit = (place / "memory.max").read_text(encoding="ascii").strip()
        used = int((place / "memory.current").read_text(encoding="ascii"))
        stat = (place / "memory.stat").read_text(encoding="ascii")
    except FileNotFoundError:  # the outermost group has no limit, and no such files
        return None
    if limit == "max":
        return None
    # File pages that nobody has used lately are given up first.
    reclaimable = next(
        (int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0
    )
    return max(0, int(limit) - used + reclaimable)
