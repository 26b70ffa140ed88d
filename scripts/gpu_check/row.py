"""Rows and checks of the GPU check.

The file imports the standard library alone.
"""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

Outcome = Literal["passed", "failed", "met", "not met", "measured", "skipped", "not measured"]
"""``met`` and ``not met`` are outcomes of targets; ``measured`` is a value without a target."""

DEVICE = "CUDA device"
"""Name of the row that must pass before any part can run on a GPU."""


class Row(NamedTuple):
    """One line of the report."""

    check: str
    outcome: Outcome
    measured: float | None = None
    unit: str = ""
    predicted: float | None = None
    target: str = ""
    note: str = ""


class Check(NamedTuple):
    """A piece of work whose failure does not stop the other checks."""

    name: str
    run: Callable[[], Iterable[Row]]
    mend: str = ""
    """What the user can do if ``run`` raises; appended to the note of the failed row."""
