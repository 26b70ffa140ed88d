"""Check the kernels, the exchanges and the training steps on a GPU, and measure their times.

    python -m scripts.gpu_check --json gpu-check.json

The check takes less than eight minutes on one H100 or H200, without a network. The package need not
be installed. A preflight looks for the packages, programs and memory that the parts need, and
prints the command that installs what is missing. The parts:

====  ==========================================
a     kernels against their references
b     exchanges between virtual ranks on one GPU
c     times and peak memory
d     training steps in both modes
e     two ranks on one GPU
====  ==========================================

A table comes last. The exit code is 1 if a row has failed; a target that is not met does not change
it. ``docs/gpu.md`` describes the rows.

    python -m scripts.gpu_check --device cpu

runs tiny sizes in Triton's interpreter. This tests the check itself, and measures nothing.

At import this file needs the standard library alone, so the preflight also runs without torch.
"""

import argparse
import sys

from scripts.gpu_check.preflight import Preflight, preflight
from scripts.gpu_check.process import PART, PartReport, run_part, skipped
from scripts.gpu_check.report import summary, table, write
from scripts.gpu_check.row import DEVICE
from scripts.output_folder import output_file

PROGRAM = "python -m scripts.gpu_check"
SECONDS = {"machine": 60.0, "a": 110.0, "b": 70.0, "c": 90.0, "d": 70.0, "e": 80.0}
"""Time limit per part; the sum is eight minutes. A part may also use the time that the part before
it has saved.
"""
PARTS = "abcde"
TIMES_ON_CPU = 4
"""Factor of the time limits in the interpreter, which is slow."""


def main(argv: list[str] | None = None, command: list[str] = PART) -> int:
    """Run the preflight and the parts, and print the table.

    :param argv: command-line arguments; ``None`` takes those of the process.
    :param command: command that runs a part.
    :returns: the exit code: 0, 1 after a failure, 2 without a GPU.
    """
    arguments = _arguments(argv)
    looked = preflight(arguments.parts, arguments.device)
    reports: list[PartReport] = []
    saved = 0.0
    for part in ["machine", *arguments.parts]:
        limit = limit_of(part, arguments.device, saved)
        report = _run(part, arguments, looked, limit, command)
        saved = max(0.0, limit - report.seconds)
        reports.append(report)
        write(reports, arguments)  # after each part: a rented machine may be taken away
        if _lacks_device(report):
            break
    print("\n" + "\n".join(table(reports)) + "\n")
    print(summary(reports))
    if arguments.json is not None:
        print(f"written: {arguments.json}")
    if _lacks_device(reports[0]):
        print("there is no CUDA device; --device cpu tests the check itself", file=sys.stderr)
        return 2
    return 1 if any(row.outcome == "failed" for report in reports for row in report.rows) else 0


def _run(
    part: str, arguments: argparse.Namespace, looked: Preflight, limit: float, command: list[str]
) -> PartReport:
    """Run a part if its modules are installed; "machine" includes the rows of the preflight."""
    if part in looked.lacking:
        report = skipped(part, looked.lacking[part])
    else:
        print(f"\npart {part}: at most {limit:.0f} s", flush=True)
        report = run_part(part, arguments.device, arguments.seed, limit, command)
    if part == "machine":
        return report._replace(rows=looked.rows + report.rows)
    return report


def _lacks_device(report: PartReport) -> bool:
    return any((row.check, row.outcome) == (DEVICE, "failed") for row in report.rows)


def limit_of(part: str, device: str, saved: float) -> float:
    """Seconds after which a part is stopped.

    :param saved: seconds that the part before it has not used.
    """
    return SECONDS[part] * (TIMES_ON_CPU if device == "cpu" else 1) + saved


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=output_file, metavar="FILE", help="file for all rows")
    parser.add_argument("--parts", default=PARTS, help="letters of parts (default: abcde)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random inputs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.parts) - set(PARTS)
    if unknown or not arguments.parts:
        parser.error(f"--parts {arguments.parts}: name some of {PARTS}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
