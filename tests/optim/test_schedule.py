"""Learning-rate schedules."""

from typing import Any

import pytest
import torch

from olmo_shard.config import ScheduleConfig
from olmo_shard.errors import ConfigurationError
from olmo_shard.optim.schedule import check_schedule, describe_schedule, learning_rate
from tests.support.close import close


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"name": "constant", "warmup_steps": 2}, {1: 0.5, 2: 1.0, 3: 1.0, 10: 1.0}),
        ({"name": "linear", "warmup_steps": 2}, {2: 1.0, 6: 0.55, 10: 0.1, 50: 0.1}),
        ({"name": "cosine", "warmup_steps": 0, "min_lr_ratio": 0.0}, {5: 0.5, 10: 0.0}),
        ({"name": "wsd", "decay_steps": 4, "min_lr_ratio": 0.0}, {1: 1, 6: 1, 8: 0.5, 10: 0}),
        ({"name": "linear", "total_steps": 20, "min_lr_ratio": 0.0}, {10: 0.5, 20: 0.0}),
    ],
)
def test_schedules_at_chosen_steps(config, expected):
    schedule = ScheduleConfig.model_validate(config)
    for step, rate in expected.items():
        found = torch.tensor(learning_rate(step, 1.0, 10, schedule), dtype=torch.float64)
        # The terms are shares of the peak rate, 1.
        close(found, torch.tensor(rate, dtype=torch.float64), scale=1.0, what=f"step {step}")


def test_the_schedule_in_force_is_described():
    schedule = ScheduleConfig(name="wsd", decay_steps=5, warmup_steps=2, min_lr_ratio=0.5)
    assert describe_schedule(0.2, 10, schedule) == (
        "wsd: 2 warm-up steps to 0.2, decay over the last 5, 0.1 at step 10"
    )


@pytest.mark.parametrize(
    ("fields", "total_steps", "message"),
    [
        ({"warmup_steps": 10}, 10, None),
        ({"warmup_steps": 11}, 10, r"warmup_steps = 11 do not fit into 10 steps \(the run's last"),
        ({"name": "constant", "warmup_steps": 11}, 10, r"warmup_steps = 11 do not fit"),
        ({"name": "wsd", "warmup_steps": 4, "decay_steps": 6}, 10, None),
        ({"name": "wsd", "warmup_steps": 4, "decay_steps": 7}, 10, r"decay_steps = 7 do not fit"),
        ({"name": "wsd", "decay_steps": 11}, 10, r"decay_steps = 11 do not fit"),
        ({"warmup_steps": 11, "total_steps": 12}, 10, None),
        (
            {"name": "wsd", "warmup_steps": 5, "decay_steps": 8, "total_steps": 12},
            99,
            r"do not fit into 12 steps \(schedule\.total_steps\)",
        ),
    ],
)
def test_warm_up_and_decay_fit_into_the_steps(
    fields: dict[str, Any], total_steps: int, message: str | None
) -> None:
    config = ScheduleConfig.model_validate(fields)
    if message is None:
        check_schedule(total_steps, config)
    else:
        with pytest.raises(ConfigurationError, match=message):
            check_schedule(total_steps, config)
