"""metrics.jsonl, eval.jsonl and experts.jsonl: the records of a run."""

from typing import IO

from olmo_shard.train.callbacks.base import Callback, RunInfo
from olmo_shard.train.records import (
    EVAL_FILE,
    EXPERTS_FILE,
    METRICS_FILE,
    Record,
    eval_record,
    to_json,
)


class JsonLines(Callback):
    """Writes one line per step, per evaluation and per report of the experts' load.

    At a resume, ``rewind`` has already moved away the lines of steps that are run again.
    """

    def __init__(self) -> None:
        self._run: RunInfo | None = None
        self._files: dict[str, IO[str]] = {}

    def on_start(self, run: RunInfo) -> None:
        """Open the files that every run has."""
        self._run = run
        for name in (METRICS_FILE, EVAL_FILE):
            self._files[name] = (run.run_dir / name).open("a", encoding="utf-8")

    def on_step(self, record: Record) -> None:
        """Write a line of metrics.jsonl."""
        self._write(METRICS_FILE, record)

    def on_eval(self, step: int, losses: dict[str, float | None]) -> None:
        """Write a line of eval.jsonl."""
        assert self._run is not None
        self._write(EVAL_FILE, eval_record(step, self._run.state.tokens, losses))

    def on_experts(self, record: Record) -> None:
        """Write a line of experts.jsonl."""
        assert self._run is not None
        if EXPERTS_FILE not in self._files:  # Opened here, since dense models have no such file.
            path = self._run.run_dir / EXPERTS_FILE
            self._files[EXPERTS_FILE] = path.open("a", encoding="utf-8")
        self._write(EXPERTS_FILE, record)

    def on_end(self) -> list[tuple[str, str]]:
        """Close the files."""
        self._close()
        return []

    def on_failure(self, error: BaseException) -> None:
        """Close the files."""
        self._close()

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _write(self, name: str, record: Record) -> None:
        self._files[name].write(to_json(record) + "\n")
        self._files[name].flush()
