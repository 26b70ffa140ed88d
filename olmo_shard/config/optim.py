"""Sections ``optim`` and ``schedule``."""

from typing import Literal

from pydantic import Field, model_validator

from olmo_shard.config.section import Section


class OptimConfig(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    """AdamW with decoupled decay, or plain SGD (which shows scale errors that Adam hides)."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled decay: a step multiplies decayed weights by 1 - lr x weight_decay."""
    no_decay: list[str] = Field(default=["*norm*", "*bias", "embedding.*"])
    """Name patterns (shell style) of parameters without decay."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Global gradient norm above which gradients are scaled down; null turns clipping off."""


class ScheduleConfig(Section):
    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; ``wsd`` holds the peak, then decays linearly over decay_steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up: step s of them has lr x s / warmup_steps."""
    decay_steps: int | None = Field(default=None, gt=0)
    """Steps of the final decay of ``wsd``."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate as a fraction of the peak."""
    total_steps: int | None = Field(default=None, gt=0)
    """Step at which the decay ends; null means the last step of the run."""

    @model_validator(mode="after")
    def _warmup_ends_before_the_decay(self) -> "ScheduleConfig":
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} is not below total_steps = {self.total_steps}"
            )
        return self

    @model_validator(mode="after")
    def _decay_belongs_to_wsd(self) -> "ScheduleConfig":
        if self.name == "wsd" and self.decay_steps is None:
            raise ValueError("wsd needs decay_steps")
        if self.name != "wsd" and self.decay_steps is not None:
            raise ValueError(f"decay_steps = {self.decay_steps} is for name = wsd, not {self.name}")
        return self
