"""Learning-rate schedules: pure functions of the step, so a resume needs no state."""

import math

from olmo_shard.config import ScheduleConfig
from olmo_shard.errors import ConfigurationError


def learning_rate(step: int, peak: float, total_steps: int, config: ScheduleConfig) -> float:
    """Learning rate of a step.

    :param step: 1 for the first optimizer step. Skipped steps count.
    :param total_steps: the run's last step; ``schedule.total_steps`` wins where it is set. After it
        the rate stays at its last value.
    """
    warmup = config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    total = config.total_steps or total_steps
    last = peak * config.min_lr_ratio
    if config.name == "constant":
        return peak
    start = warmup if config.decay_steps is None else max(warmup, total - config.decay_steps)
    progress = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    if config.name == "cosine":
        return last + (peak - last) * (1 + math.cos(math.pi * progress)) / 2
    return peak + (last - peak) * progress


def check_schedule(total_steps: int, config: ScheduleConfig) -> None:
    """Whether warm-up and decay fit into the steps that the schedule is made for.

    :param total_steps: the run's last step; ``schedule.total_steps`` wins where it is set.
    :raises ConfigurationError: where they do not fit: the rate would never be what was asked for.
    """
    total, warmup, decay = (
        config.total_steps or total_steps,
        config.warmup_steps,
        config.decay_steps,
    )
    if warmup + (decay or 0) <= total:
        return
    end = "schedule.total_steps" if config.total_steps else "the run's last step"
    asked = f"schedule.warmup_steps = {warmup}"
    if decay is not None:
        asked += f" and schedule.decay_steps = {decay}"
    raise ConfigurationError(
        f"{asked} do not fit into {total} steps ({end}): lower them, train longer, or, for a short "
        "trial of a long schedule, set schedule.total_steps to the long run's last step"
    )


def describe_schedule(peak: float, total_steps: int, config: ScheduleConfig) -> str:
    """One line for the log: the schedule in force."""
    total = config.total_steps or total_steps
    decay = f", decay over the last {config.decay_steps}" if config.decay_steps else ""
    final = peak if config.name == "constant" else peak * config.min_lr_ratio
    return (
        f"{config.name}: {config.warmup_steps} warm-up steps to {peak:g}{decay}, "
        f"{final:g} at step {total}"
    )
