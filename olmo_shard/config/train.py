"""Sections ``train``, ``eval``, ``checkpoint`` and ``tracking``: the training loop."""

from typing import Literal

from pydantic import Field, model_validator

from olmo_shard.config.run import RunConfig
from olmo_shard.config.section import Section


class SpikeConfig(Section):
    """Rule by which a step is skipped if its loss or gradient norm is far above the recent ones."""

    watch: Literal["loss", "grad_norm", "both"] = "both"
    """Values that are compared with the window: the loss, the gradient norm, or each of the two."""
    sigmas: float = Field(default=6.0, gt=0)
    """A value is a spike above mean + sigmas x standard deviation of the window."""
    window: int = Field(default=128, ge=2)
    """Number of most recent applied steps in the window. No step is skipped before the window is
    full.
    """


class TrainConfig(Section):
    """Batch size, end of the run, and limits on skipped steps."""

    steps: int | None = Field(default=None, gt=0, le=10**9)
    """End of the run, in optimizer steps. Give exactly one of steps, tokens and epochs."""
    tokens: int | None = Field(default=None, gt=0, le=10**18)
    """End of the run, in drawn tokens with or without a label: the last step that fits completely.

    A resumed run spends the rest of this budget at the global batch of its own config.
    """
    epochs: float | None = Field(default=None, gt=0, le=10**6)
    """End of the run, in multiples of the sequences of all sources: the last step that fits.

    The number of drawn sequences counts, whatever the mixture. A resumed run spends the rest.
    """
    global_batch_tokens: int = Field(gt=0, le=10**10)
    """Number of tokens per optimizer step, over all ranks."""
    micro_batch_tokens: int = Field(gt=0)
    """Number of tokens per forward and backward on one rank."""
    skip_spikes: SpikeConfig | None = None
    """Rule for skipping spikes. With null, only a gradient norm that is not finite skips a step."""
    max_skipped_steps: int = Field(default=10, ge=0)
    """Largest number of skipped steps in a row. One more ends the run with an error."""
    log_every: int = Field(default=10, gt=0)
    """Number of steps per console line, if the output is not a terminal."""

    @model_validator(mode="after")
    def _one_end(self) -> "TrainConfig":
        ends = {"steps": self.steps, "tokens": self.tokens, "epochs": self.epochs}
        given = {name: value for name, value in ends.items() if value is not None}
        if len(given) != 1:
            listed = ", ".join(f"{name} = {value}" for name, value in given.items())
            raise ValueError(
                f"give exactly one of steps, tokens, epochs; found {listed or 'none of them'}"
            )
        return self


class EvalConfig(Section):
    """Evaluation on the validation sets of ``data.validation``."""

    every: int = Field(default=0, ge=0)
    """Number of steps per evaluation of all validation sets. The last step is evaluated as well. 0
    means no evaluation.
    """
    tokens: int = Field(default=65_536, gt=0)
    """Largest number of tokens read from each validation set. At least one sequence is read."""


class CheckpointConfig(Section):
    """When checkpoints are saved, and which checkpoint a run starts from."""

    every: int | None = Field(default=0, ge=0)
    """Number of steps per checkpoint. The last step is saved as well. 0 saves the last step only,
    and null saves no checkpoint.
    """
    keep_last: int | None = Field(default=None, gt=0)
    """Number of newest checkpoints to keep. Null keeps all of them."""
    resume: str = "auto"
    """Checkpoint to resume from. ``auto``: the newest complete checkpoint in run.dir, if there is
    one. ``never``: none; a run.dir with checkpoints is an error. Any other value: the path of a
    checkpoint.
    """
    init_from: str | None = Field(default=None, min_length=1)
    """Path of a checkpoint whose weights a new run starts from. Optimizer state, schedule and data
    position start afresh.
    """


class TrackingConfig(Section):
    """Tracking with W&B, and records of expert load."""

    wandb: Literal["auto", "offline", "off"] = "auto"
    """``auto``: online if there is an API key and the server answers, else offline. ``offline``:
    files in run.dir/wandb only. ``off``: no tracking.
    """
    project: str = "olmo_shard"
    """W&B project of the run."""
    entity: str | None = None
    """W&B user or team of the run. Null means the default entity of the API key."""
    name: str | None = None
    """Display name of the run in W&B. Null means the last part of run.dir."""
    init_seconds: float = Field(default=30.0, gt=0, le=3600)
    """Longest time in seconds for W&B to open an online run. After it the run is tracked offline.
    The limit is at most a quarter of run.timeout_seconds. Training does not wait.
    """
    finish_seconds: float = Field(default=60.0, gt=0, le=3600)
    """Longest time in seconds for W&B to finish after the last step. The rest stays on disk. The
    limit is at most half of run.timeout_seconds. W&B writes to disk every 15 seconds, so a value
    below 20 can lose the last steps in W&B if the server is silent. metrics.jsonl has them.
    """
    experts_every: int = Field(default=100, ge=0)
    """Number of steps per line of experts.jsonl, and per picture of expert load in W&B. The last
    step has a line as well. 0 means the last step only.
    """

    def init_bound(self, run: RunConfig) -> float:
        """Return the seconds after which an online start is abandoned."""
        return min(self.init_seconds, run.timeout_seconds / 4)

    def finish_bound(self, run: RunConfig) -> float:
        """Return the seconds, after the last step, after which the tracker process is ended."""
        return min(self.finish_seconds, run.timeout_seconds / 2)
