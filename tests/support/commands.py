"""Running the commands in this process and in others, and reading the records of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol


class Main(Protocol):
    """Type of the fixture ``main``, which runs a command in this process."""

    def __call__(self, *args: object) -> tuple[int, str]:
        """Run a command; returns its exit code and everything that it printed."""
        ...


def records(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the lines of a record."""
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    """Return step, loss and gradient norm of each line of metrics.jsonl."""
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records(run_dir)]


def start(
    *args: object,
    env: dict[str, str] | None = None,
    module: str = "olmo_shard",
    cwd: Path | None = None,
) -> subprocess.Popen[str]:
    """Start a command in another process, with its output and errors in one pipe."""
    command = [sys.executable, "-m", module, *map(str, args)]
    return subprocess.Popen(
        command,
        env=os.environ | (env or {}),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    """Wait for a process; returns its exit code and output."""
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output


def children(parent: int) -> list[int]:
    """Return the process ids of a process's children."""
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in path.read_text().split()]
