"""What can be hung on a trainer. Callbacks run on rank 0 alone, so they must not communicate."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_shard.config import Config
from olmo_shard.train.records import Record
from olmo_shard.train.rewind import Rewound
from olmo_shard.train.state import TrainState


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a callback may know of the run."""

    config: Config
    run_dir: Path
    total_steps: int
    state: TrainState
    notes: list[str]
    """Lines about what was chosen or derived: layout, schedule, where it resumed."""
    ranks: int = 1
    checkpoint: Path | None = None
    """The checkpoint that the run resumed from; ``None`` for a new run."""
    rewound: Rewound = field(default_factory=Rewound)
    """What the records held beyond the checkpoint's step."""

    def layout(self) -> dict[str, Any]:
        """What a resume may change without changing the result."""
        parallel = self.config.parallel
        return {
            "mode": parallel.mode,
            "ranks": self.ranks,
            "expert_parallel": parallel.expert_parallel,
            "compute_dtype": parallel.compute_dtype,
        }


class Callback:
    """Override what is needed."""

    def on_start(self, run: RunInfo) -> None:
        """Before the first step."""

    def on_step(self, record: Record) -> None:
        """After each step, with the record of metrics.jsonl."""

    def on_eval(self, step: int, losses: dict[str, float | None]) -> None:
        """After each evaluation, with the loss of each validation set.

        A set in which no token has a label has the loss ``None``.
        """

    def on_experts(self, record: Record) -> None:
        """Every ``tracking.experts_every`` steps, with the line of experts.jsonl."""

    def on_checkpoint(self, path: Path) -> None:
        """After a checkpoint has its name."""

    def on_note(self, message: str) -> None:
        """Something that a person should know: a skipped step, for one."""

    def on_end(self) -> list[tuple[str, str]]:
        """After the last step: lines for the summary, as (name, value)."""
        return []

    def on_failure(self, error: BaseException) -> None:
        """When an error ends the run."""
