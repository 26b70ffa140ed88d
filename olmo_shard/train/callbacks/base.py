"""The interface of callbacks. They run on rank 0 only, so they must not communicate."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_shard.config import Config
from olmo_shard.train.records import Record
from olmo_shard.train.rewind import Rewound
from olmo_shard.train.state import TrainState


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a callback sees of the run."""

    config: Config
    run_dir: Path
    total_steps: int
    """Number of the run's last step."""
    state: TrainState
    """The trainer's state, which changes with every step."""
    notes: list[str]
    """Lines for the log about what was chosen: layout, schedule, start of a resume."""
    ranks: int = 1
    """Number of ranks of the run."""
    checkpoint: Path | None = None
    """The checkpoint from which the run resumed; ``None`` for a new run."""
    rewound: Rewound = field(default_factory=Rewound)
    """The records of steps after the checkpoint, which were moved away."""

    def layout(self) -> dict[str, Any]:
        """The settings that a resume may change without changing the result."""
        parallel = self.config.parallel
        return {
            "mode": parallel.mode,
            "ranks": self.ranks,
            "expert_parallel": parallel.expert_parallel,
            "compute_dtype": parallel.compute_dtype,
        }


class Callback:
    """Methods that the trainer calls. Subclasses override those that they need."""

    def on_start(self, run: RunInfo) -> None:
        """Called before the first step."""

    def on_step(self, record: Record) -> None:
        """Called after each step, with the step's line of metrics.jsonl."""

    def on_eval(self, step: int, losses: dict[str, float | None]) -> None:
        """Called after each evaluation.

        :param losses: loss by set name; ``None`` for a set in which no token has a label.
        """

    def on_experts(self, record: Record) -> None:
        """Called every ``tracking.experts_every`` steps, with the line of experts.jsonl."""

    def on_checkpoint(self, path: Path) -> None:
        """Called after a checkpoint is complete under its final name."""

    def on_note(self, message: str) -> None:
        """Called with a message for the user, for example about a skipped step."""

    def on_end(self) -> list[tuple[str, str]]:
        """Called after the last step; returns lines for the summary, as (name, value)."""
        return []

    def on_failure(self, error: BaseException) -> None:
        """Called when an error ends the run."""
