"""Running the commands, in this process and in others, and reading what a run left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def records(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records(run_dir)]


def start(
    *args: object,
    env: dict[str, str] | None = None,
    module: str = "olmo_shard",
    cwd: Path | None = None,
):
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
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output


def children(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in path.read_text().split()]
