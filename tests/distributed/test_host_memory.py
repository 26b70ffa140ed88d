"""Available memory, from fake files of the kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from olmo_shard.distributed import host_memory
from olmo_shard.distributed.host_memory import available_memory, format_bytes

GIB = 2**30
Kernel = Callable[[str, dict[str, dict[str, str]]], None]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """``kernel(cgroup, groups)``: 8 GiB on the host, this process in ``cgroup``."""

    def make(cgroup: str, groups: dict[str, dict[str, str]]) -> None:
        meminfo = tmp_path / "meminfo"
        meminfo.write_text("MemTotal:  16777216 kB\nMemAvailable:   8388608 kB\nShmem: 12 kB\n")
        (tmp_path / "cgroup").write_text(cgroup)
        for name, files in groups.items():
            folder = tmp_path / "groups" / name
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (folder / file).write_text(text)
        monkeypatch.setattr(host_memory, "_MEMINFO", meminfo)
        monkeypatch.setattr(host_memory, "_CGROUP", tmp_path / "cgroup")
        monkeypatch.setattr(host_memory, "_CGROUP_ROOT", tmp_path / "groups")

    return make


def group(limit: int | str, used: int, inactive: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "groups", "expected"),
    [
        ("0::/\n", {}, 8 * GIB),
        ("0::/job\n", {"job": group("max", GIB)}, 8 * GIB),
        ("0::/job\n", {"job": group(4 * GIB, GIB)}, 3 * GIB),
        ("0::/job\n", {"job": group(4 * GIB, 3 * GIB, inactive=GIB)}, 2 * GIB),
        ("0::/job\n", {"job": group(4 * GIB, 5 * GIB)}, 0),
        ("0::/job/rank\n", {"job": group(4 * GIB, GIB), "job/rank": group("max", 9)}, 3 * GIB),
        ("0::/\n", {"": group(2 * GIB, GIB)}, GIB),  # a container sees its own group as the root
        ("4:memory:/job\n", {}, 8 * GIB),  # version 1: not looked at
    ],
)
def test_the_least_of_host_and_control_groups(
    kernel: Kernel, cgroup: str, groups: dict[str, Any], expected: int
) -> None:
    kernel(cgroup, groups)
    assert available_memory() == expected


def test_this_machine_has_some() -> None:
    assert 2**20 < available_memory() <= int(Path("/proc/meminfo").read_text().split()[1]) * 1024


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (3 * GIB + 100, "3,221,225,572 bytes (3.0 GiB)"),
        (5 * 2**20, "5,242,880 bytes (5.0 MiB)"),
        (512, "512 bytes (0.5 KiB)"),
    ],
)
def test_bytes_in_units(num_bytes: int, said: str) -> None:
    assert format_bytes(num_bytes) == said
