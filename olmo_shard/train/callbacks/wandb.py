"""Weights & Biases (W&B): one W&B run per training run. A failure of W&B never ends the run."""

import shlex
import uuid
from queue import Empty
from typing import Any

from rich.console import Console as RichConsole

from olmo_shard.train.callbacks.base import Callback, RunInfo
from olmo_shard.train.records import Record, eval_record
from olmo_shard.train.tracking.messages import Opened, Request
from olmo_shard.train.tracking.process import TrackerProcess


class WandB(Callback):
    """Logs the records of metrics.jsonl. W&B's step is the optimizer's step.

    A separate process talks to W&B, so training never waits for a server. An offline run is written
    in segments, one per start of the job, under one run id. The checkpoint keeps the id and the
    list of segments, and the summary prints the command that uploads them in order.
    """

    def __init__(self, console: RichConsole) -> None:
        self.console = console
        self._info: RunInfo | None = None
        self._process: TrackerProcess | None = None
        self._opened: Opened | None = None
        self._begun_at = 0

    def on_start(self, run: RunInfo) -> None:
        """Start the tracker process, under the run id of the checkpoint or a new one."""
        self._info, self._begun_at = run, run.state.step
        request = _request(run)
        run.state.tracker_run_id = request.run_id
        self._process = TrackerProcess(request, run.run_dir / "wandb" / "client.log")

    def on_step(self, record: Record) -> None:
        """Log the step."""
        self._send(step=record["step"], values=flatten(record))

    def on_eval(self, step: int, losses: dict[str, float | None]) -> None:
        """Log the evaluation."""
        assert self._info is not None
        self._send(step=step, values=eval_record(step, self._info.state.tokens, losses))

    def on_experts(self, record: Record) -> None:
        """Log the load of the experts."""
        self._send(step=record["step"], experts=record)

    def on_note(self, message: str) -> None:
        """Send the message as an alert."""
        self._send(alert=message)

    def on_end(self) -> list[tuple[str, str]]:
        """Wait for the upload, within its time bound, and print where the run is."""
        if self._process is None:
            return []
        self._process.finish()
        self._print_news()
        return self._summary(finished=self._process.finished)

    def on_failure(self, error: BaseException) -> None:
        """Mark the run in W&B as failed, without waiting for the tracker process."""
        if self._process is not None:
            self._process.leave()
            self._print_news()

    def _send(self, **message: Any) -> None:
        assert self._process is not None
        self._process.send(**message)
        self._print_news()

    def _print_news(self) -> None:
        """Print what the tracker process has reported since the last call."""
        assert self._process is not None
        # The queue is read without waiting: training must not depend on the tracker.
        while True:
            try:
                news = self._process.news.get_nowait()
            except Empty:
                return
            if isinstance(news, Opened):
                self._on_opened(news)
            else:
                self._print(f"W&B stopped: {news}; the run goes on, metrics.jsonl has every step")

    def _on_opened(self, opened: Opened) -> None:
        assert self._info is not None
        self._opened = opened
        if opened.mode == "disabled":
            return
        place = opened.url if opened.mode != "offline" else f"{opened.folder} ({opened.reason})"
        self._print(f"W&B       {opened.mode}: {place}")
        state = self._info.state
        if opened.first_step > self._begun_at + 1:
            self._print(f"W&B       has the steps before {opened.first_step} already")
        if opened.mode == "offline":
            state.tracker_segments = [*segments(self._info)]

    def _summary(self, *, finished: bool) -> list[tuple[str, str]]:
        """The run's address in W&B, and the command that uploads the segments that are missing."""
        opened, info = self._opened, self._info
        if opened is None or info is None or opened.mode == "disabled":
            return []
        folders, online = segments(info), opened.mode != "offline"
        name = "W&B run" if online else "W&B offline run"
        lines = [(name, (opened.url or opened.folder) if online else opened.folder)]
        command = ["wandb", "sync"]
        if online and not finished:
            seconds = info.config.tracking.finish_bound(info.config.run)
            lines.append(("not uploaded", f"W&B did not finish within {seconds:g} s"))
            folders.append(opened.folder)
            command.append("--include-online")
        if folders:
            lines.append(("to upload it", shlex.join([*command, *folders])))
        return lines

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False)


def segments(info: RunInfo) -> list[str]:
    """Folders of the run's offline segments, oldest first.

    The run's folder is searched in addition to the checkpoint's list: a start that was killed
    before its first checkpoint has left a segment that no list contains.
    """
    folders = sorted((info.run_dir / "wandb").glob(f"offline-run-*-{info.state.tracker_run_id}"))
    return list(dict.fromkeys([*info.state.tracker_segments, *(str(path) for path in folders)]))


def flatten(record: Record) -> Record:
    """A record with one value per name, as W&B draws it.

    A list over MoE layers becomes one value per layer: ``moe/0/load_max_over_mean``. A mapping by
    kind becomes one value per kind: ``wire_bytes_by_kind/reduce``.
    """
    flat: Record = {}
    for name, value in record.items():
        if isinstance(value, list):
            flat |= {f"moe/{layer}/{name}": item for layer, item in enumerate(value)}
        elif isinstance(value, dict):
            flat |= {f"{name}/{kind}": item for kind, item in value.items()}
        else:
            flat[name] = value
    return flat


def _request(run: RunInfo) -> Request:
    """What the tracker process needs to open the run in W&B."""
    tracking, state = run.config.tracking, run.state
    resumed = run.checkpoint is not None
    layout = {f"resume/{name}": value for name, value in run.layout().items()}
    offline = tracking.wandb == "offline"
    return Request(
        mode="offline" if offline else "auto",
        reason="tracking.wandb = offline" if offline else "",
        project=tracking.project,
        entity=tracking.entity,
        name=tracking.name or run.run_dir.name,
        run_id=state.tracker_run_id or uuid.uuid4().hex[:8],
        run_dir=str(run.run_dir),
        config=run.config.model_dump(),
        recorded_step=run.rewound.last_step if state.tracker_run_id else 0,
        has_segments=bool(state.tracker_run_id and segments(run)),
        mark={"resume/step": state.step, **layout} if resumed else {},
        init_seconds=tracking.init_bound(run.config.run),
        finish_seconds=tracking.finish_bound(run.config.run),
    )
