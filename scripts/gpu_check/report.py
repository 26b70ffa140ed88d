"""The report of the GPU check: a table, a summary, a JSON document.

The file imports the standard library alone.
"""

import argparse
import datetime
import json
import math
import shutil
import subprocess
from collections import Counter
from typing import Any

from scripts.bench.tables import header, line
from scripts.gpu_check.process import PartReport
from scripts.gpu_check.row import Row


def table(reports: list[PartReport]) -> list[str]:
    """The lines of a Markdown table with one line per row."""
    lines = header("", "check", "measured", "predicted", "target", "", "note")
    for report in reports:
        for row in report.rows:
            measured = "" if row.measured is None else f"{row.measured:.4g} {row.unit}"
            predicted = "" if row.predicted is None else f"{row.predicted:.4g}"
            cells = report.part, row.check, measured, predicted, row.target, row.outcome, row.note
            lines.append(line(*cells))
    return lines


def summary(reports: list[PartReport]) -> str:
    """One line: the number of rows per outcome, and the seconds of all parts."""
    counts = Counter(row.outcome for report in reports for row in report.rows)
    seconds = sum(report.seconds for report in reports)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return f"{outcomes}; {seconds:.0f} s"


def write(reports: list[PartReport], arguments: argparse.Namespace) -> None:
    """Write the reports so far to the file of ``--json``, if there is one."""
    if arguments.json is not None:
        document = as_document(reports, arguments)
        arguments.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


def as_document(reports: list[PartReport], arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON document: date, machine, arguments, and the rows of each part."""
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
    """The fields of a row; JSON has no infinity and no NaN, so they become words."""
    fields = row._asdict()
    for name in ("measured", "predicted"):
        if fields[name] is not None and not math.isfinite(fields[name]):
            fields[name] = str(fields[name])
    return fields


def _driver() -> str | None:
    """Version of the NVIDIA driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
