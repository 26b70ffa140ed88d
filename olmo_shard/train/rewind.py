"""At a resume, the lines of steps that are done again leave the records; none is deleted."""

from dataclasses import dataclass, field
from pathlib import Path

from olmo_shard.train.records import (
    EVAL_FILE,
    EVENTS_FILE,
    EXPERTS_FILE,
    FILE,
    Record,
    read_records,
    to_json,
)

STEP_FILES = (EVAL_FILE, EXPERTS_FILE, FILE)
"""Records with lines that belong to steps."""


@dataclass(frozen=True, kw_only=True)
class Rewound:
    last_step: int = 0
    """Last step in metrics.jsonl before; 0 if there was none."""
    replaced: dict[str, int] = field(default_factory=dict)
    """Number of lines that were moved, by the name of the file that now holds them."""


def rewind(run_dir: Path, step: int) -> Rewound:
    """Move the lines beyond a step to ``metrics.replaced.jsonl`` and its like.

    Every record ends with a whole line then, so that the next line begins at a line's start.
    """
    before = read_records(run_dir / FILE)
    replaced: dict[str, int] = {}
    for name in STEP_FILES:
        path = run_dir / name
        records = read_records(path)
        gone = [record for record in records if record["step"] > step]
        if gone:
            replaced[_keep(gone, replaced_file(path))] = len(gone)
        if path.exists():
            _write_anew(path, [record for record in records if record["step"] <= step])
    events = run_dir / EVENTS_FILE
    if events.exists():
        _write_anew(events, read_records(events))
    return Rewound(last_step=max((r["step"] for r in before), default=0), replaced=replaced)


def replaced_file(path: Path) -> Path:
    """Where the replaced lines of a record are kept."""
    return path.with_name(f"{path.stem}.replaced{path.suffix}")


def _keep(gone: list[Record], path: Path) -> str:
    """Add lines to those that were replaced before; returns the file's name."""
    before = read_records(path)
    if before[-len(gone) :] != gone:  # else a kill came after this and before the move's end
        _write_anew(path, before + gone)
    return path.name


def _write_anew(path: Path, records: list[Record]) -> None:
    """Replace a file in one rename. A last line that a kill cut short goes, too."""
    shorter = path.with_name(path.name + ".partial")
    with shorter.open("w", encoding="utf-8") as file:
        file.writelines(to_json(record) + "\n" for record in records)
    shorter.replace(path)
