"""At a resume, the records of steps that are run again move to another file; none is deleted."""

from dataclasses import dataclass, field
from pathlib import Path

from olmo_shard.train.records import (
    EVAL_FILE,
    EVENTS_FILE,
    EXPERTS_FILE,
    METRICS_FILE,
    Record,
    read_records,
    to_json,
)

STEP_FILES = (EVAL_FILE, EXPERTS_FILE, METRICS_FILE)
"""Files whose lines belong to steps."""


@dataclass(frozen=True, kw_only=True)
class Rewound:
    """What ``rewind`` found and moved."""

    last_step: int = 0
    """Last step in metrics.jsonl before the rewind; 0 without any step."""
    replaced: dict[str, int] = field(default_factory=dict)
    """Number of moved lines, by the name of the file that now contains them."""


def rewind(run_dir: Path, step: int) -> Rewound:
    """Move the lines after a step to ``metrics.replaced.jsonl``, ``eval.replaced.jsonl`` and so on.

    All files then end with a whole line, so that the next record starts a line.

    :param run_dir: folder of the run.
    :param step: step of the checkpoint from which the run continues.
    """
    before = read_records(run_dir / METRICS_FILE)
    replaced: dict[str, int] = {}
    for name in STEP_FILES:
        path = run_dir / name
        records = read_records(path)
        later = [record for record in records if record["step"] > step]
        # First add the lines to the other file, then drop them here: a kill loses none of them.
        if later:
            replaced[_append(later, replaced_file(path))] = len(later)
        if path.exists():
            _rewrite(path, [record for record in records if record["step"] <= step])
    events = run_dir / EVENTS_FILE
    if events.exists():
        _rewrite(events, read_records(events))
    return Rewound(last_step=max((r["step"] for r in before), default=0), replaced=replaced)


def replaced_file(path: Path) -> Path:
    """The file for the replaced lines of a file of records."""
    return path.with_name(f"{path.stem}.replaced{path.suffix}")


def _append(later: list[Record], path: Path) -> str:
    """Add records to those that earlier resumes replaced; returns the file's name."""
    before = read_records(path)
    # The file already ends with these records if a kill interrupted an earlier, equal move.
    if before[-len(later) :] != later:
        _rewrite(path, before + later)
    return path.name


def _rewrite(path: Path, records: list[Record]) -> None:
    """Replace a file by one rename, without a last line that a kill cut short."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(to_json(record) + "\n" for record in records)
    partial.replace(path)
