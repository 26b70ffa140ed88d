"""Run a part of the GPU check in a process with a time limit, and read its report.

The file imports the standard library alone.
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

from scripts.gpu_check.row import Row

ROOT = Path(__file__).parents[2]
"""Root of the repository. A process that starts in this folder imports the package from it, so the
package need not be installed.
"""
PART = [sys.executable, "-m", "scripts.gpu_check.part"]
"""Command that runs a part."""


class PartReport(NamedTuple):
    """The result of a part."""

    part: str
    seconds: float
    machine: dict[str, Any]
    rows: list[Row]
    times: dict[str, float]
    """Seconds per check."""


def skipped(part: str, reason: str) -> PartReport:
    """Return the report of a part that was not started."""
    return PartReport(part, 0.0, {}, [Row(f"part {part}", "skipped", note=reason)], {})


def run_part(part: str, device: str, seed: int, limit: float, command: list[str]) -> PartReport:
    """Run a part. A crash, an error and a time-out become failed rows.

    :param part: its letter, or ``machine``.
    :param limit: seconds after which the process is killed.
    :param command: command that runs a part, without its options.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        out.touch()
        # A process group of its own: its children are killed with it.
        options = ["--device", device, "--seed", str(seed), "--out", str(out)]
        process = subprocess.Popen(
            [*command, part, *options], cwd=ROOT, env=_environment(part, device), process_group=0
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
    changed = {"TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    changed["PYTHONFAULTHANDLER"] = "1"  # a crash prints its stack
    if part == "e":
        changed["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return os.environ | changed


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the part and its children. After a normal end there are none."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _report(part: str, seconds: float, lines: list[dict[str, Any]], ended: str) -> PartReport:
    """Build the report from the lines that a part has written.

    :param ended: how the process failed; empty after a normal end.
    """
    machine: dict[str, Any] = next((line["machine"] for line in lines if "machine" in line), {})
    rows = [Row(**line["row"]) for line in lines if "row" in line]
    times = {line["check"]: line["seconds"] for line in lines if "check" in line}
    # The last check that began is the one in which the process ended.
    if ended:
        last = [line["begun"] for line in lines if "begun" in line][-1:]
        during = f"during {last[0]}" if last else "before its first step"
        note = f"{ended}, {during}; later checks did not run; the messages are above the table"
        rows.append(Row(f"part {part}", "failed", note=note))
    elif not rows:
        rows.append(Row(f"part {part}", "failed", note="nothing was checked"))
    return PartReport(part, seconds, machine, rows, times)
