"""Evaluation, and what a step leaves behind."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from olmo_shard.config import load_config
from olmo_shard.data.validation import open_validation
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.nn.moe import MoE
from olmo_shard.optim.sharded import DistributedOptimizer
from olmo_shard.parallel.apply import parallelize
from olmo_shard.train.evaluate import evaluate
from olmo_shard.train.state import seed_step
from tests.support.close import same_figures
from tests.support.configs import write_config
from tests.support.ranks import mesh_of
from tests.support.tiny import build, meta_model, model_config, train


def evaluate_case(rank: Runtime, path: str, overrides: list[str]) -> dict[str, float | None]:
    config = load_config(path, overrides)
    mesh = mesh_of(rank, config.parallel.expert_parallel)
    parallel_model = parallelize(meta_model(config.model), mesh, config.parallel, seed=1)
    DistributedOptimizer(parallel_model, mesh, config.optim)
    return evaluate(parallel_model, open_validation(config), mesh)


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (2, ["parallel.expert_parallel=2"]),
        (3, []),  # 20 sequences do not divide by 3 ranks x 2
        (4, ["parallel.expert_parallel=2", "parallel.mode=fsdp", "train.micro_batch_tokens=48"]),
    ],
)
def test_validation_loss_is_the_same_mean_on_any_number_of_ranks(
    ranks: Any, tmp_path: Path, size: int, overrides: list[str]
) -> None:
    path = str(write_config(tmp_path))
    (expected,) = ranks(1).run(evaluate_case, path, [])
    for found in ranks(size).run(evaluate_case, path, overrides):
        same_figures(found["held_out"], expected["held_out"])


def leftovers_case(rank: Runtime) -> tuple[int, int]:
    """Live tensors after 5 and after 50 steps in which every token prefers one expert."""
    config = model_config(router={"bias_gamma": 0.0, "lb_loss_weight": 0.0})
    step = build(rank, config, {"expert_parallel": rank.world_size}, {"name": "sgd"})
    for module in step.model.modules():
        if isinstance(module, MoE):
            module.router.expert_bias[0] = 100.0
    counts = []
    for start, steps in ((0, 5), (5, 45)):
        train(step, rank, steps, 4, start=start)
        gc.collect()
        counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
    return counts[0], counts[1]


def test_nothing_of_a_step_outlives_it(ranks: Any) -> None:
    for early, late in ranks(2).run(leftovers_case):
        assert late == early


def random_numbers(*key: int) -> Any:
    seed_step(*key)
    return torch.rand(4).tolist()


def test_random_numbers_follow_from_seed_step_and_rank() -> None:
    state = torch.get_rng_state()
    first = random_numbers(1, 2, 3)
    assert random_numbers(1, 2, 3) == first
    others = [random_numbers(*key) for key in ((0, 2, 3), (1, 3, 3), (1, 2, 0))]
    assert first not in others
    torch.set_rng_state(state)
