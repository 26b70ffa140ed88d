"""metrics.jsonl: the record of a run, one JSON object a step."""

import json
from pathlib import Path
from typing import IO, Any

from olmo_shard.errors import ConfigurationError
from olmo_shard.train.callbacks.base import Callback, RunInfo

FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"


class JsonLines(Callback):
    """Writes metrics.jsonl (steps) and eval.jsonl (evaluations) in the run's folder.

    After a resume, lines beyond the checkpoint's step are dropped: those steps are done again.
    """

    def __init__(self) -> None:
        self._steps: IO[str] | None = None
        self._evals: IO[str] | None = None

    def on_start(self, run: RunInfo) -> None:
        self._steps = _reopen(run.run_dir / FILE, run.state.step)
        self._evals = _reopen(run.run_dir / EVAL_FILE, run.state.step)

    def on_step(self, record: dict[str, Any]) -> None:
        _write(self._steps, record)

    def on_eval(self, step: int, losses: dict[str, float]) -> None:
        _write(self._evals, {"step": step, **{f"eval/{name}": v for name, v in losses.items()}})

    def on_end(self) -> list[tuple[str, str]]:
        self._close()
        return []

    def on_failure(self) -> None:
        self._close()

    def _close(self) -> None:
        for file in (self._steps, self._evals):
            if file is not None:
                file.close()
        self._steps = self._evals = None


def read_records(path: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """Records up to ``last_step``; a last line that a kill cut short is left out.

    :raises ConfigurationError: naming file and line where one is no record.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    whole = lines[:-1]  # what follows the last newline is empty, or cut short
    records = [_parsed(line, path, number) for number, line in enumerate(whole, start=1)]
    return [r for r in records if last_step is None or r["step"] <= last_step]


def _parsed(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ConfigurationError(f"{path} line {number} is no record of a step: remove the line")
    return record


def _reopen(path: Path, last_step: int) -> IO[str]:
    kept = read_records(path, last_step)
    file = path.open("w", encoding="utf-8")
    for record in kept:
        _write(file, record)
    return file


def _write(file: IO[str] | None, record: dict[str, Any]) -> None:
    assert file is not None
    file.write(json.dumps(record) + "\n")
    file.flush()
