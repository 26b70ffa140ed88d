"""Sections ``train``, ``eval``, ``checkpoint`` and ``tracking``: what surrounds the step."""

from typing import Literal

from pydantic import Field, model_validator

from olmo_shard.config.base import Section
from olmo_shard.config.run import RunConfig


class SpikeConfig(Section):
    """Skip steps whose loss or gradient norm is far above those of the steps before."""

    watch: Literal["loss", "grad_norm", "both"] = "both"
    """Figures that can be a spike."""
    sigmas: float = Field(default=6.0, gt=0)
    """A spike is above mean + sigmas x standard deviation of the window."""
    window: int = Field(default=128, ge=2)
    """Applied steps to compare with; nothing is judged before there are as many."""


class TrainConfig(Section):
    steps: int | None = Field(default=None, gt=0, le=10**9)
    """Stop after this many optimizer steps."""
    tokens: int | None = Field(default=None, gt=0, le=10**18)
    """Stop at the last whole step within this many tokens, with or without a label.

    A resume spends what is left of them at the global batch of its config.
    """
    epochs: float | None = Field(default=None, gt=0, le=10**6)
    """Stop at the last whole step within this many times the sequences of all sources.

    Drawn sequences count by number, whatever the mixture; a resume spends what is left.
    """
    global_batch_tokens: int = Field(gt=0, le=10**10)
    """Tokens of one optimizer step over all ranks."""
    micro_batch_tokens: int = Field(gt=0)
    """Tokens of one forward-backward on one rank."""
    skip_spikes: SpikeConfig | None = None
    """Null: only steps whose gradient norm is not finite are skipped."""
    max_skipped_steps: int = Field(default=10, ge=0)
    """Steps skipped in a row, for whatever reason, after which the run ends with an error."""
    log_every: int = Field(default=10, gt=0)
    """Steps between two plain console lines (when the output is not a terminal)."""

    @model_validator(mode="after")
    def _one_end(self) -> "TrainConfig":
        ends = {"steps": self.steps, "tokens": self.tokens, "epochs": self.epochs}
        given = {name: value for name, value in ends.items() if value is not None}
        if len(given) != 1:
            found = (
                ", ".join(f"{name} = {value}" for name, value in given.items()) or "none of them"
            )
            raise ValueError(f"give exactly one of steps, tokens, epochs; found {found}")
        return self


class EvalConfig(Section):
    every: int = Field(default=0, ge=0)
    """Steps between evaluations of all validation sets (and once at the end); 0 means never."""
    tokens: int = Field(default=65_536, gt=0)
    """Tokens read from each validation set, at most (but one sequence at least)."""


class CheckpointConfig(Section):
    every: int | None = Field(default=0, ge=0)
    """Steps between checkpoints. A checkpoint at the end always follows; 0 saves at the end only,
    and null saves nothing.
    """
    keep_last: int | None = Field(default=None, gt=0)
    """Checkpoints to keep; null keeps all."""
    resume: str = "auto"
    """``auto``: the newest complete checkpoint of run.dir; ``never``: none; or the path of one."""
    init_from: str | None = Field(default=None, min_length=1)
    """Checkpoint whose weights a new run starts from, with fresh optimizer, schedule and data."""


class TrackingConfig(Section):
    wandb: Literal["auto", "offline", "off"] = "auto"
    """``auto`` is online where a key is at hand and the server answers, else offline."""
    project: str = "olmo_shard"
    entity: str | None = None
    name: str | None = None
    """Display name of the run; null takes the last part of run.dir."""
    init_seconds: float = Field(default=30.0, gt=0, le=3600)
    """Seconds in which W&B must have opened an online run, else the run is tracked offline. Never
    more than a quarter of run.timeout_seconds. Training does not wait meanwhile.
    """
    finish_seconds: float = Field(default=60.0, gt=0, le=3600)
    """Seconds in which W&B must have finished after the last step; the rest stays on disk. Never
    more than half of run.timeout_seconds. W&B writes to disk every 15 seconds, so a value below 20
    can lose the last steps of a run whose server is silent (metrics.jsonl has them).
    """
    experts_every: int = Field(default=100, ge=0)
    """Steps between two lines of experts.jsonl (and pictures of expert load in W&B). A line at the
    end always follows; 0 means at the end only.
    """

    def init_bound(self, run: RunConfig) -> float:
        """Seconds after which an online start is given up."""
        return min(self.init_seconds, run.timeout_seconds / 4)

    def finish_bound(self, run: RunConfig) -> float:
        """Seconds after which the tracker is ended."""
        return min(self.finish_seconds, run.timeout_seconds / 2)
