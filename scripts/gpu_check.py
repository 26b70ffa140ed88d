"""Check the kernels, the exchanges and the training steps on a GPU, and time them.

    python scripts/gpu_check.py --json gpu-check.json

On a machine with one H100 or H200, in less than eight minutes, without a network. A preflight comes
first: the packages, programs and memory that the parts need, with the command that mends what is
missing. A table comes last. Exit code 1 if anything is wrong; a target that is not met is only
said. Parts: (a) kernels against references, (b) exchanges of virtual ranks, (c) times, (d) training
steps, (e) two ranks on one GPU. ``docs/gpu.md`` says more.

    python scripts/gpu_check.py --device cpu

runs tiny sizes in Triton's interpreter: that tests the script, and times nothing.

At import this file needs the standard library alone, so the preflight runs before torch is there.
"""

import argparse
import sys
from pathlib import Path

from gpu_check_document import summary, table, write
from gpu_check_preflight import Preflight, preflight
from gpu_check_process import PROGRAM, PartReport, run_part, skipped
from gpu_check_row import DEVICE
from output_folder import output_file

SECONDS = {"machine": 60.0, "a": 110.0, "b": 70.0, "c": 90.0, "d": 70.0, "e": 80.0}
"""Limit of each part: eight minutes together. The next parts may use what one part leaves."""
PARTS = "abcde"
TIMES_ON_CPU = 4
"""The interpreter is slow."""


def main(argv: list[str] | None = None, program: Path = PROGRAM) -> int:
    """The exit code.

    :param program: what runs a part.
    """
    arguments = _arguments(argv)
    found = preflight(arguments.parts, arguments.device)
    reports: list[PartReport] = []
    saved = 0.0
    for part in ["machine", *arguments.parts]:
        limit = limit_of(part, arguments.device, saved)
        report = _run(part, arguments, found, limit, program)
        saved = max(0.0, limit - report.seconds)
        reports.append(report)
        write(reports, arguments)  # after each part: a machine may be taken away
        if _lacks_device(report):
            break
    print("\n" + "\n".join(table(reports)) + "\n")
    print(summary(reports))
    if arguments.json is not None:
        print(f"written: {arguments.json}")
    if _lacks_device(reports[0]):
        print("no CUDA device is here; --device cpu tests the script alone", file=sys.stderr)
        return 2
    return 1 if any(row.outcome == "failed" for each in reports for row in each.rows) else 0


def _run(
    part: str, arguments: argparse.Namespace, found: Preflight, limit: float, program: Path
) -> PartReport:
    """Run a part if its modules are there; the part "machine" has the preflight's rows, too."""
    if part in found.lacking:
        report = skipped(part, found.lacking[part])
    else:
        print(f"\npart {part}: at most {limit:.0f} s", flush=True)
        report = run_part(part, arguments.device, arguments.seed, limit, program)
    if part == "machine":
        return report._replace(rows=found.rows + report.rows)
    return report


def _lacks_device(report: PartReport) -> bool:
    return any((row.check, row.outcome) == (DEVICE, "failed") for row in report.rows)


def limit_of(part: str, device: str, saved: float) -> float:
    """Seconds that a part may take.

    :param saved: seconds that the part before has left over.
    """
    return SECONDS[part] * (TIMES_ON_CPU if device == "cpu" else 1) + saved


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=output_file, metavar="FILE", help="keep all figures there")
    parser.add_argument("--parts", default=PARTS, help="of abcde")
    parser.add_argument("--seed", type=int, default=0, help="of all random inputs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.parts) - set(PARTS)
    if unknown or not arguments.parts:
        parser.error(f"--parts {arguments.parts}: name some of {PARTS}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
