"""Learning-rate schedules: pure functions of the step, so that a resume needs no state."""

import math

from olmo_shard.config import ScheduleConfig
from olmo_shard.errors import ConfigurationError


def learning_rate(step: int, peak: float, total_steps: int, config: ScheduleConfig) -> float:
    """Learning rate of a step.

    :param step: number of the step, 1 for the first. Skipped steps count.
    :param peak: learning rate after the warm-up.
    :param total_steps: the run's last step; ``schedule.total_steps`` replaces it if set. After
        it the learning rate stays at its last value.
    """
    # Warm-up: linear from peak / warmup_steps to the peak.
    warmup = config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    total = config.total_steps or total_steps
    last = peak * config.min_lr_ratio
    if config.name == "constant":
        return peak
    # Decay: by the share of the steps between its start and its end. Only wsd starts it late.
    start = warmup if config.decay_steps is None else max(warmup, total - config.decay_steps)
    progress = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    if config.name == "cosine":
        return last + (peak - last) * (1 + math.cos(math.pi * progress)) / 2
    return peak + (last - peak) * progress


def check_schedule(total_steps: int, config: ScheduleConfig) -> None:
    """Check that warm-up and decay fit into the schedule's steps.

    :param total_steps: the run's last step; ``schedule.total_steps`` replaces it if set.
    :raises ConfigurationError: if they do not fit, because the learning rate would then never reach
        its peak or its last value.
    """
    total, warmup, decay = (
        config.total_steps or total_steps,
        config.warmup_steps,
        config.decay_steps,
    )
    if warmup + (decay or 0) <= total:
        return
    end = "schedule.total_steps" if config.total_steps else "the run's last step"
    fields = f"schedule.warmup_steps = {warmup}"
    if decay is not None:
        fields += f" and schedule.decay_steps = {decay}"
    raise ConfigurationError(
        f"{fields} do not fit into {total} steps ({end}): lower them, train longer, or, for a "
        "short trial of a long schedule, set schedule.total_steps to the long run's last step"
    )


def describe_schedule(peak: float, total_steps: int, config: ScheduleConfig) -> str:
    """One line for the log that describes the schedule in force."""
    total = config.total_steps or total_steps
    decay = f", decay over the last {config.decay_steps}" if config.decay_steps else ""
    final = peak if config.name == "constant" else peak * config.min_lr_ratio
    return (
        f"{config.name}: {config.warmup_steps} warm-up steps to {peak:g}{decay}, "
        f"{final:g} at step {total}"
    )
