"""The trainer's own state: small, the same on every rank, kept as JSON in a checkpoint."""

import hashlib

import torch
from pydantic import BaseModel, ConfigDict, Field


class TrainState(BaseModel):
    """Equal on every rank, but for the tracker's fields, which rank 0 holds."""

    model_config = ConfigDict(extra="forbid", strict=True)

    step: int = 0
    """Optimizer steps taken, skipped ones included."""
    tokens: int = 0
    """Tokens with a label trained on, over all ranks."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    spike_window: list[list[float]] = Field(default_factory=lambda: [[], []])
    """Losses and gradient norms that train.skip_spikes compares with, as of the checkpoint."""
    tracker_run_id: str | None = None
    tracker_segments: list[str] = Field(default_factory=list)
    """Folders of offline W&B segments, oldest first."""

    def count(self, tokens: int, *, applied: bool) -> None:
        """Count a step's tokens, and whether it was skipped."""
        self.tokens += tokens
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        self.skipped_steps += not applied


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators for one step.

    Random numbers of a step depend on nothing but (seed, step, rank), so a resume needs no saved
    generator, and after a change of the number of ranks each rank simply has its own numbers again.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
