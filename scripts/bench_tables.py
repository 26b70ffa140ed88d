"""Tables of a benchmark whose contenders took turns."""

import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""A contender's ``name``, its ``seconds`` in one turn, and what it was measured on."""


def header(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def of(rows: list[Row], name: str) -> list[Row]:
    """One contender's rows, in the order of turns."""
    return [row for row in rows if row["name"] == name]


def median_seconds(rows: list[Row], name: str) -> float:
    return statistics.median(row["seconds"] for row in of(rows, name))


def ratio(rows: list[Row], name: str, other: str) -> float:
    """Median over the turns of one contender's time by another's."""
    pairs = zip(of(rows, name), of(rows, other), strict=True)
    return statistics.median(mine["seconds"] / theirs["seconds"] for mine, theirs in pairs)


def write(table: list[str], rows: list[Row], stem: Path | None) -> None:
    """Print a table under the command that made it; keep it and all figures where asked to."""
    command = shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    text = "\n".join([f"`{command}`", "", *table, ""])
    print(f"\n{text}")
    if stem is not None:
        stem.with_suffix(".md").write_text(text, encoding="utf-8")
        stem.with_suffix(".json").write_text(json.dumps(rows), encoding="utf-8")
        print(f"written: {stem}.md, .json")
