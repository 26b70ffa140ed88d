"""Markdown tables of benchmarks in which the variants of an operation run in turn.

The file imports the standard library alone: the GPU check uses it before it imports torch.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""One measurement: a variant's ``name``, its ``seconds`` in one round, and the sizes."""


def line(*cells: str) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def header(*names: str) -> list[str]:
    """The two lines that begin a Markdown table with these columns."""
    return [line(*names), "|---" * len(names) + "|"]


def of_variant(rows: list[Row], name: str) -> list[Row]:
    """The rows of one variant, in the order of rounds."""
    return [row for row in rows if row["name"] == name]


def median_seconds(rows: list[Row], name: str) -> float:
    """A variant's median time over the rounds, in seconds."""
    return statistics.median(row["seconds"] for row in of_variant(rows, name))


def ratio(rows: list[Row], name: str, other: str) -> float:
    """Median over the rounds of the time of variant ``name`` divided by that of ``other``."""
    pairs = zip(of_variant(rows, name), of_variant(rows, other), strict=True)
    return statistics.median(first["seconds"] / second["seconds"] for first, second in pairs)


def origin(module: str) -> str:
    """Two Markdown paragraphs: the command that made a table; date, commit, versions and machine.

    :param module: module that this process runs, such as ``scripts.bench.dispatch``.
    """
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    today = datetime.datetime.now(datetime.UTC).date()
    made = [f"Made on {today}"]
    commit = _commit()
    if commit:
        made.append(f"commit {commit}")
    made.append(f"torch {importlib.metadata.version('torch')}")
    made.append(f"Python {platform.python_version()}")
    made.append(f"{os.cpu_count()} cores of {_processor()}")
    return f"`{command}`\n\n{', '.join(made)}."


def _commit() -> str:
    """The commit of the working tree; empty outside of a Git repository."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # Git is not installed
        return ""
    return done.stdout.strip()


def _processor() -> str:
    """The name of the processor, from Linux's list if there is one."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
    names = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    return names[0] if names else platform.machine()


def write(table: list[str], rows: list[Row], stem: Path | None, module: str) -> None:
    """Print a table below its origin, and write both, with all rows, to files.

    :param stem: path of the files without a suffix; ``None`` writes no file.
    :param module: see ``origin``.
    """
    text = "\n".join([origin(module), "", *table, ""])
    print(f"\n{text}")
    if stem is not None:
        stem.with_suffix(".md").write_text(text, encoding="utf-8")
        stem.with_suffix(".json").write_text(json.dumps(rows), encoding="utf-8")
        print(f"written: {stem}.md, .json")
