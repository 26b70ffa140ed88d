"""A part of the GPU check as a process with a time limit, and what the part reports.

This file imports the standard library alone.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from gpu_check_row import Row

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("gpu_check_part.py")


class PartReport(NamedTuple):
    part: str
    seconds: float
    machine: dict[str, Any]
    rows: list[Row]
    times: dict[str, float]
    """Seconds of each check."""


def skipped(part: str, reason: str) -> PartReport:
    """The report of a part that was not started."""
    return PartReport(part, 0.0, {}, [Row(f"part {part}", "skipped", note=reason)], {})


def run_part(part: str, device: str, seed: int, limit: float, program: Path) -> PartReport:
    """Run a part; whatever ends its process becomes a row.

    :param limit: seconds.
    :param program: what runs the part.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        out.touch()
        command = [sys.executable, str(program), part, "--device", device]
        command += ["--seed", str(seed), "--out", str(out)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(part, device), process_group=0
        )
        try:
            code = process.wait(limit)
            ended = "" if code == 0 else f"ended with exit status {code}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s"
        finally:
            _end_group(process)
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return _report(part, time.monotonic() - begun, lines, ended)


def _environment(part: str, device: str) -> dict[str, str]:
    paths = [str(PROGRAM.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    changed = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    changed["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    changed["PYTHONFAULTHANDLER"] = "1"  # a crash prints where it happened
    if part == "e":
        changed["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return os.environ | changed


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the part and what it started; nothing is left of a part that has ended well."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _report(part: str, seconds: float, lines: list[dict[str, Any]], ended: str) -> PartReport:
    """:param ended: what was wrong with the end of the part's process; empty if nothing was."""
    machine: dict[str, Any] = next((line["machine"] for line in lines if "machine" in line), {})
    rows = [Row(**line["row"]) for line in lines if "row" in line]
    times = {line["check"]: line["seconds"] for line in lines if "check" in line}
    if ended:
        last = [line["begun"] for line in lines if "begun" in line][-1:]
        during = f"during {last[0]}" if last else "before its first step"
        note = f"{ended}, {during}; what follows did not run; its messages are above the table"
        rows.append(Row(f"part {part}", "failed", note=note))
    elif not rows:
        rows.append(Row(f"part {part}", "failed", note="nothing was checked"))
    return PartReport(part, seconds, machine, rows, times)
