"""What the GPU check found: a table, a summary, a JSON document.

This file imports the standard library alone.
"""

import argparse
import datetime
import json
import math
import shutil
import subprocess
from collections import Counter
from typing import Any

from bench_tables import header
from gpu_check_process import PartReport
from gpu_check_row import Row


def table(reports: list[PartReport]) -> list[str]:
    lines = header("", "check", "measured", "predicted", "target", "", "note")
    for report in reports:
        for row in report.rows:
            measured = "" if row.measured is None else f"{row.measured:.4g} {row.unit}"
            predicted = "" if row.predicted is None else f"{row.predicted:.4g}"
            cells = report.part, row.check, measured, predicted, row.target, row.outcome, row.note
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary(reports: list[PartReport]) -> str:
    counts = Counter(row.outcome for report in reports for row in report.rows)
    seconds = sum(report.seconds for report in reports)
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return f"{said}; {seconds:.0f} s"


def write(reports: list[PartReport], arguments: argparse.Namespace) -> None:
    """Write what was found so far to the file that ``--json`` names, if it names one."""
    if arguments.json is not None:
        document = as_document(reports, arguments)
        arguments.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


def as_document(reports: list[PartReport], arguments: argparse.Namespace) -> dict[str, Any]:
    machine = next((report.machine for report in reports if report.machine), {})
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine | {"driver": _driver() if arguments.device == "cuda" else None},
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "parts": [
            {
                "part": report.part,
                "seconds": report.seconds,
                "seconds_by_check": report.times,
                "rows": [_finite(row) for row in report.rows],
            }
            for report in reports
        ],
    }


def _finite(row: Row) -> dict[str, Any]:
    """JSON has no infinity: a number that is none becomes a word."""
    fields = row._asdict()
    for name in ("measured", "predicted"):
        if fields[name] is not None and not math.isfinite(fields[name]):
            fields[name] = str(fields[name])
    return fields


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False)
    return said.stdout.strip().splitlines()[0] if said.stdout.strip() else None
