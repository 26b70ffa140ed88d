"""Learning-rate schedules. Runs in CI."""

import pytest

from olmo_shard.config import ScheduleConfig
from olmo_shard.optim.schedule import describe_schedule, learning_rate


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
        assert learning_rate(step, 1.0, 10, schedule) == pytest.approx(rate), step


def test_the_schedule_in_force_is_described():
    schedule = ScheduleConfig(name="wsd", decay_steps=5, warmup_steps=2, min_lr_ratio=0.5)
    assert describe_schedule(0.2, 10, schedule) == (
        "wsd: 2 warm-up steps to 0.2, decay over the last 5, 0.1 at step 10"
    )
