"""metrics.jsonl: the record of a run, one JSON object a step."""

from pathlib import Path
from typing import IO

from olmo_shard.train.callbacks.base import Callback, RunInfo
from olmo_shard.train.records import EVAL_FILE, FILE, Record, read_records, to_json


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

    def on_step(self, record: Record) -> None:
        _write(self._steps, record)

    def on_eval(self, step: int, losses: dict[str, float | None]) -> None:
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


def _reopen(path: Path, last_step: int) -> IO[str]:
    """Open for appending; what goes beyond ``last_step`` is dropped, in one rename."""
    kept = read_records(path, last_step)
    shorter = path.with_name(path.name + ".partial")
    with shorter.open("w", encoding="utf-8") as file:
        for record in kept:
            _write(file, record)
    shorter.replace(path)
    return path.open("a", encoding="utf-8")


def _write(file: IO[str] | None, record: Record) -> None:
    assert file is not None
    file.write(to_json(record) + "\n")
    file.flush()
