"""Rows and checks of the GPU check. This file imports the standard library alone."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

Outcome = Literal["passed", "failed", "met", "not met", "measured", "skipped", "not measured"]
"""``met`` and ``not met`` are said of targets, ``measured`` of figures without a target."""


DEVICE = "CUDA device"
"""The row without which no part can run on a GPU."""


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
    """A piece of work that can fail alone."""

    name: str
    run: Callable[[], Iterable[Row]]
    mend: str = ""
    """What to do where ``run`` raises; it ends the note of the failed row."""
