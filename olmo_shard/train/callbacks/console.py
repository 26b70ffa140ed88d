"""The console: progress, messages and the summary of a run."""

from collections import deque
from pathlib import Path

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from olmo_shard.train.callbacks.base import Callback, RunInfo
from olmo_shard.train.records import Record


class Console(Callback):
    """Shows a progress bar on a terminal, and a line every ``train.log_every`` steps elsewhere."""

    def __init__(self, console: RichConsole) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._run: RunInfo | None = None
        self._first_step = 0
        # The last steps only: early ones contain warm-up and compilation.
        self._seconds: deque[float] = deque(maxlen=20)

    def on_start(self, run: RunInfo) -> None:
        """Print the notes, and start the progress bar."""
        self._run, self._first_step = run, run.state.step
        for note in run.notes:
            self.console.print(note, markup=False)
        if self.console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self.console)
            self._progress.add_task(
                "train", total=run.total_steps, completed=run.state.step, figures=""
            )
            self._progress.start()

    def on_step(self, record: Record) -> None:
        """Show the step's loss, norm, learning rate and speed."""
        assert self._run is not None
        step, total = record["step"], self._run.total_steps
        self._seconds.append(record["step_seconds"])
        if self._progress is not None:
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=step, figures=_figures(record))
        elif step % self._run.config.train.log_every == 0 or step in (self._first_step + 1, total):
            self.console.print(f"step {step}/{total}  {_figures(record)}  ETA {self._eta(step)}")

    def on_eval(self, step: int, losses: dict[str, float | None]) -> None:
        """Print the loss of each validation set."""
        for name, loss in losses.items():
            figure = "no token has a label" if loss is None else f"loss {loss:.4f}"
            self.console.print(f"step {step}  validation {name}: {figure}", markup=False)

    def on_checkpoint(self, path: Path) -> None:
        """Print the checkpoint's path."""
        self.console.print(f"checkpoint {path}", markup=False)

    def on_note(self, message: str) -> None:
        """Print the message."""
        self.console.print(message, markup=False)

    def on_end(self) -> list[tuple[str, str]]:
        """Stop the progress bar."""
        self._stop()
        return []

    def on_failure(self, error: BaseException) -> None:
        """Stop the progress bar."""
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _eta(self, step: int) -> str:
        """Time to the end of the run, as h:mm:ss, from the mean of the last 20 steps."""
        assert self._run is not None
        mean = sum(self._seconds) / len(self._seconds)
        seconds = round((self._run.total_steps - step) * mean)
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def print_summary(console: RichConsole, lines: list[tuple[str, str]]) -> None:
    """Print the summary of a run.

    :param lines: pairs (name, value).
    """
    width = max(len(name) for name, _ in lines)
    console.print()
    for name, value in lines:
        console.print(f"{name:<{width}}  {value}", markup=False)


def _figures(record: Record) -> str:
    mfu = f"  mfu {record['mfu']:.1%}" if record["mfu"] is not None else ""
    skipped = f"  skipped {record['skipped_steps']}" if record["skipped_steps"] else ""
    loss = "-" if record["loss"] is None else f"{record['loss']:.4f}"
    return (
        f"loss {loss}  norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  "
        f"{record['tokens_per_second']:,.0f} tokens/s{mfu}{skipped}"
    )
