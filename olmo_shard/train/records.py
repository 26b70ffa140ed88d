"""The records of a run, one JSON object per line.

| file | one line is |
|---|---|
| metrics.jsonl | a step |
| eval.jsonl | an evaluation |
| experts.jsonl | the routes to each expert over some steps |
| events.jsonl | a start, a resume, a note, a failure or an end |
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from olmo_shard.errors import ConfigurationError

METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"
EXPERTS_FILE = "experts.jsonl"
EVENTS_FILE = "events.jsonl"
CONFIG_FILE = "config.yaml"
LOSS_PICTURE = "loss.png"
EXPERTS_PICTURE = "experts.png"

Record = dict[str, Any]
"""JSON values by name."""


def to_json(record: Record) -> str:
    """One line of JSON. Numbers that are not finite become null, since JSON cannot express them."""
    return json.dumps({name: _finite(value) for name, value in record.items()}, allow_nan=False)


def perplexity(loss: float | None) -> float | None:
    """exp(loss), or ``None`` if there is no loss or the result is not finite."""
    if loss is None or not loss < math.log(sys.float_info.max):
        return None
    return math.exp(loss)


def eval_record(step: int, tokens: int, losses: dict[str, float | None]) -> Record:
    """The record of an evaluation: loss and perplexity by validation set.

    :param tokens: number of tokens with a label that the run has trained on so far.
    :param losses: mean loss by set name; ``None`` for a set in which no token has a label.
    """
    return {
        "step": step,
        "tokens_total": tokens,
        **{f"eval/{name}": loss for name, loss in losses.items()},
        **{f"eval_perplexity/{name}": perplexity(loss) for name, loss in losses.items()},
    }


def read_records(path: Path, last_step: int | None = None) -> list[Record]:
    """The records of a file, without a last line that a kill cut short.

    :param last_step: leave out records of later steps; ``None`` returns all records.
    :raises ConfigurationError: if a line is no record. The message names file and line.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    whole = lines[:-1]  # The text after the last newline is empty or cut short.
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
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
