"""Check the kernels, the exchanges and the training steps on a GPU, and time them.

    python scripts/gpu_check.py --json gpu-check.json

On a machine with one H100 or H200, in less than eight minutes, without a network. A table comes
last. Exit code 1 if anything is wrong; a target that is not met is only said. Parts: (a) kernels
against references, (b) exchanges of virtual ranks, (c) times, (d) training steps, (e) two ranks on
one GPU. ``docs/gpu.md`` says more.

    python scripts/gpu_check.py --device cpu

runs tiny sizes in Triton's interpreter: that tests the script, and times nothing.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_tables import header
from gpu_check_report import Row

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("gpu_check_part.py")
SECONDS = {"a": 140.0, "b": 80.0, "c": 100.0, "d": 80.0, "e": 80.0}
"""Limit of each part: eight minutes together. What one leaves, the next ones may use as well."""
TIMES_ON_CPU = 4
"""The interpreter is slow."""


class PartReport(NamedTuple):
    part: str
    seconds: float
    machine: dict[str, Any]
    rows: list[Row]
    times: dict[str, float]
    """Seconds of each check."""


def main(argv: list[str] | None = None, program: Path = PROGRAM) -> int:
    """The exit code.

    :param program: what runs a part.
    """
    arguments = _arguments(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is here; --device cpu tests the script alone", file=sys.stderr)
        return 2
    reports: list[PartReport] = []
    saved = 0.0
    for part in arguments.parts:
        limit = limit_of(part, arguments.device, saved)
        print(f"\npart {part}: at most {limit:.0f} s", flush=True)
        reports.append(run_part(part, arguments.device, arguments.seed, limit, program))
        saved = max(0.0, limit - reports[-1].seconds)
    print("\n" + "\n".join(table(reports)) + "\n")
    print(summary(reports))
    if arguments.json is not None:
        document = as_document(reports, arguments)
        arguments.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
        print(f"written: {arguments.json}")
    return 1 if any(row.outcome == "failed" for each in reports for row in each.rows) else 0


def limit_of(part: str, device: str, saved: float) -> float:
    """Seconds that a part may take.

    :param saved: seconds that the part before has left over.
    """
    return SECONDS[part] * (TIMES_ON_CPU if device == "cpu" else 1) + saved


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures there")
    parser.add_argument("--parts", default="".join(SECONDS), help="of abcde")
    parser.add_argument("--seed", type=int, default=0, help="of all random inputs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.parts) - set(SECONDS)
    if unknown or not arguments.parts:
        parser.error(f"--parts {arguments.parts}: name some of {''.join(SECONDS)}")
    return arguments


def run_part(part: str, device: str, seed: int, limit: float, program: Path) -> PartReport:
    """Run a part in a process of its own; whatever ends it becomes a row."""
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
    if part == "e":
        changed["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return os.environ | changed


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The part and what it started; nothing is left of a part that has ended well."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _report(part: str, seconds: float, lines: list[dict[str, Any]], ended: str) -> PartReport:
    """:param ended: what was wrong with the end of its process."""
    machine: dict[str, Any] = next((line["machine"] for line in lines if "machine" in line), {})
    rows = [Row(**line["row"]) for line in lines if "row" in line]
    times = {line["check"]: line["seconds"] for line in lines if "check" in line}
    if ended:
        last = [line["begun"] for line in lines if "begun" in line][-1:]
        during = f"during {last[0]}; what follows did not run" if last else "at its start"
        rows.append(Row(f"part {part}", "failed", note=f"{ended}, {during}"))
    elif not rows:
        rows.append(Row(f"part {part}", "failed", note="nothing was checked"))
    return PartReport(part, seconds, machine, rows, times)


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


if __name__ == "__main__":
    sys.exit(main())
