"""Sections ``optim`` and ``schedule``."""

from typing import Literal

from pydantic import Field, model_validator

from olmo_shard.config.section import Section


class ParameterGroupConfig(Section):
    """Settings for the parameters whose names match a pattern."""

    match: list[str] = Field(min_length=1)
    """Name patterns (shell style), such as ``*norm*``. The name of a parameter must match one of
    them from its first to its last letter. A pattern that matches no parameter is an error.

    Embeddings are ``embedding.*``, the head is ``lm_head.*`` (a model with tied embeddings has no
    head of its own), routers are ``*.router.*``, norms ``*norm*``, routed experts ``*.experts.*``,
    shared experts ``*.shared_experts.*``, attention matrices ``*.attention.w*``."""
    lr_multiplier: float = Field(default=1.0, ge=0)
    """Factor of the learning rate, at every step of the schedule; 0 freezes the parameters."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of the group, also for parameters of ``no_decay``; null means
    ``optim.weight_decay``, and 0 for parameters of ``no_decay``."""


class OptimConfig(Section):
    """Update rule, its constants, and the parameter groups."""

    name: Literal["adamw", "sgd"] = "adamw"
    """AdamW with decoupled weight decay, or plain SGD, which shows scale errors that Adam hides."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay per step of AdamW's mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay per step of AdamW's mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Constant that AdamW adds to the square root in its denominator."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay: each step multiplies weights by 1 - learning rate x weight_decay."""
    no_decay: list[str] = Field(default=["*norm*", "*bias", "embedding.*"])
    """Name patterns (shell style) of parameters without weight decay. A pattern may match no
    parameter."""
    groups: list[ParameterGroupConfig] = Field(default=[])
    """Parameter groups with their own learning rate and weight decay. A parameter belongs to the
    first group that matches its name; parameters without a group keep ``lr``, ``weight_decay`` and
    ``no_decay``. Groups are no part of a checkpoint: a resumed run may have other groups."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Global gradient norm above which gradients are scaled down; null turns clipping off."""


class ScheduleConfig(Section):
    """Learning rate as a function of the step."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; ``wsd`` holds the peak, then decays linearly over decay_steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps of linear warm-up: step s has the learning rate lr x s / warmup_steps."""
    decay_steps: int | None = Field(default=None, gt=0)
    """Number of steps of the final decay of ``wsd``."""
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
