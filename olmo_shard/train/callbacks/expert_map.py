"""experts.png: the load of each expert over the last steps of a run."""

from olmo_shard.train.callbacks.base import Callback, RunInfo
from olmo_shard.train.expert_picture import draw
from olmo_shard.train.records import EXPERTS_PICTURE, Record


class ExpertMap(Callback):
    """Draws the last line of experts.jsonl. A dense model has no such line, and gets no picture."""

    def __init__(self) -> None:
        self._run: RunInfo | None = None
        self._last: Record | None = None

    def on_start(self, run: RunInfo) -> None:
        """Keep the run's folder."""
        self._run = run

    def on_experts(self, record: Record) -> None:
        """Keep the newest line."""
        self._last = record

    def on_end(self) -> list[tuple[str, str]]:
        """Draw the picture."""
        if self._run is None or self._last is None:
            return []
        path = self._run.run_dir / EXPERTS_PICTURE
        draw(self._last, path)
        return [("expert load", str(path))]
