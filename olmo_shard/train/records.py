"""The records of a run: a JSON object per step in metrics.jsonl, per evaluation in eval.jsonl."""

import json
import math
from pathlib import Path
from typing import Any

from olmo_shard.errors import ConfigurationError

FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"
CONFIG_FILE = "config.yaml"
PICTURE = "loss.png"

Record = dict[str, Any]
"""JSON values by name."""


def to_json(record: Record) -> str:
    """One line of JSON; figures that are not finite become null, which JSON has no word for."""
    return json.dumps({name: _finite(value) for name, value in record.items()}, allow_nan=False)


def read_records(path: Path, last_step: int | None = None) -> list[Record]:
    """Records up to ``last_step``; a last line that a kill cut short is left out.

    :raises ConfigurationError: naming file and line where one is no record.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    whole = lines[:-1]  # what follows the last newline is empty, or cut short
    records = [_parsed(line, path, number) for number, line in enumerate(whole, start=1)]
    return [r for r in records if last_step is None or r["step"] <= last_step]


def _parsed(line: str, path: Path, number: int) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ConfigurationError(f"{path} line {number} is no record of a step: remove the line")
    return record


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
