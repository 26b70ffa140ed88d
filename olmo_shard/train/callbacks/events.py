"""events.jsonl: the starts, resumes, notes, failures and ends of a run."""

from datetime import UTC, datetime
from pathlib import Path

from olmo_shard import __version__
from olmo_shard.train.callbacks.base import Callback, RunInfo
from olmo_shard.train.records import EVENTS_FILE, Record, read_records, to_json


class Events(Callback):
    """Appends events to events.jsonl. They have a file of their own so that a line of metrics.jsonl
    is always a step.
    """

    def __init__(self) -> None:
        self._run: RunInfo | None = None

    def on_start(self, run: RunInfo) -> None:
        """Write ``start``, or ``resume`` with the checkpoint and the reason of the resume."""
        self._run = run
        if run.checkpoint is None:
            weights = run.config.checkpoint.init_from
            self._write("start", **run.layout(), weights_from=weights)
            return
        self._write(
            "resume",
            checkpoint=str(run.checkpoint),
            reason=_reason(run),
            **run.layout(),
            last_recorded_step=run.rewound.last_step,
            replaced=run.rewound.replaced,
        )

    def on_note(self, message: str) -> None:
        """Write ``note``."""
        self._write("note", message=message)

    def on_end(self) -> list[tuple[str, str]]:
        """Write ``end``."""
        self._write("end")
        return []

    def on_failure(self, error: BaseException) -> None:
        """Write ``failure`` with the error."""
        self._write("failure", message=f"{type(error).__name__}: {error}")

    def _write(self, event: str, **values: object) -> None:
        if self._run is None:  # The start of another callback has failed before ours.
            return
        # UTC: a run may resume in another time zone.
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line: Record = {
            "step": self._run.state.step,
            "event": event,
            "time": now,
            "version": __version__,
            **values,
        }
        with _path(self._run).open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")


def _reason(run: RunInfo) -> str:
    """How the previous start of this run ended."""
    events = read_records(_path(run))
    last = events[-1] if events else {"event": None}
    if last["event"] == "end":
        return f"the previous start reached its end, step {last['step']}"
    if last["event"] == "failure":
        return f"the previous start failed at step {last['step']}: {last['message']}"
    return "the previous start was ended from outside: it recorded no end"


def _path(run: RunInfo) -> Path:
    return run.run_dir / EVENTS_FILE
