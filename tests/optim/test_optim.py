"""AdamW against torch's, SGD, schedules, clipping, skipping. Runs on gloo, in CI."""

from typing import Any

import pytest
import torch

from olmo_shard.config import OptimConfig, ScheduleConfig
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.optim.adamw import StepScalars, adamw_, sgd_
from olmo_shard.optim.schedule import describe_schedule, learning_rate
from tests.support.tiny import build, model_config, moe_layer, owned, train, window_of


def scalars(lr: float, divisor: float = 1.0, skip: float = 0.0) -> StepScalars:
    return StepScalars(lr=lr, divisor=torch.tensor(divisor), skip=torch.tensor(skip))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_torchs(weight_decay):
    torch.manual_seed(0)
    main = torch.randn(1000)
    reference = torch.nn.Parameter(main.clone())
    config = OptimConfig(beta1=0.8, beta2=0.9, eps=1e-6)
    optimizer = torch.optim.AdamW(
        [reference], lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=weight_decay
    )
    exp_avg, exp_avg_sq, count = torch.zeros(1000), torch.zeros(1000), torch.zeros(())
    for _ in range(5):
        gradient = torch.randn(1000)
        reference.grad = gradient / 2
        optimizer.step()
        count += 1
        adamw_(
            [main],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [count],
            scalars(0.01, 2.0),
            config,
            weight_decay,
        )
    torch.testing.assert_close(main, reference.detach(), rtol=1e-6, atol=1e-7)


def test_sgd_by_hand():
    main, gradient = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])
    sgd_([main], [gradient], scalars(0.5, divisor=2.0), weight_decay=0.1)
    assert torch.allclose(main, torch.tensor([0.95 - 1.0, 1.9 - 2.0]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_skipped_step_moves_nothing(bad):
    main, gradient = torch.tensor([1.0, 2.0]), torch.tensor([bad, 1.0])
    sgd_([main], [gradient.clone()], scalars(0.5, skip=1.0), weight_decay=0.1)
    assert main.tolist() == [1.0, 2.0]
    exp_avg, exp_avg_sq = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4])
    lists = [main], [gradient], [exp_avg], [exp_avg_sq], [torch.ones(())]
    adamw_(*lists, scalars(0.5, bad, 1.0), OptimConfig(), 0.1)
    assert main.tolist() == [1.0, 2.0]
    assert exp_avg.tolist() == pytest.approx([0.1, 0.2])
    assert exp_avg_sq.tolist() == pytest.approx([0.3, 0.4])


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


def clip_case(rank: Runtime, limit: float | None) -> tuple[float, Any]:
    optim = {"name": "sgd", "max_grad_norm": limit, "weight_decay": 0.0}
    step = build(rank, model_config(), {"expert_parallel": rank.world_size}, optim)
    before = [shard.main.clone() for shard in step.optimizer.shards]
    (output,) = train(step, rank, 1, 4, lr=1.0)
    moved = sum(
        float((shard.main - old).double().square().sum())
        for shard, old in zip(step.optimizer.shards, before, strict=True)
    )
    return float(output.grad_norm), moved


@pytest.mark.parametrize("size", [1, 2])
def test_clipping_bounds_the_whole_models_update(ranks, size):
    parts = ranks(size).run(clip_case, 0.01)
    assert parts[0][0] > 0.1
    assert sum(moved for _, moved in parts) ** 0.5 == pytest.approx(0.01, rel=1e-4)
    free = ranks(size).run(clip_case, None)
    assert sum(moved for _, moved in free) ** 0.5 == pytest.approx(free[0][0], rel=1e-4)


def skip_case(rank: Runtime, parallel: dict[str, Any], name: str) -> tuple[Any, ...]:
    """Rank 1's second micro-batch meets a NaN before the router of the last layer."""
    step = build(rank, model_config(), parallel, {"name": name})
    train(step, rank, 1, 4, lr=1e-2)

    def state() -> list[torch.Tensor]:
        optimizer = step.optimizer
        moments = [*optimizer.exp_avgs, *optimizer.exp_avg_sqs, optimizer.step_count]
        weights = [shard.main for shard in optimizer.shards]
        return [t.clone() for t in (*weights, *moments, *step.model.buffers())]

    before = state()
    calls = []

    def poison(module: Any, args: tuple[torch.Tensor, ...]) -> Any:
        calls.append(1)
        if rank.rank == 1 and len(calls) == 2:
            x = args[0].clone()
            x[0, 3] = float("nan")
            return (x, *args[1:])
        return None

    handle = moe_layer(step.model, 2).router.register_forward_pre_hook(poison)
    output = step(window_of(1, rank.rank, rank.world_size, 4, ignored=False), 1e-2)
    handle.remove()
    unchanged = all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    where = step.non_finite_cause(output)
    (after,) = train(step, rank, 1, 4, lr=1e-2, start=2)
    return bool(output.applied), unchanged, where, bool(after.applied), float(after.grad_norm)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize(
    "parallel", [{"expert_parallel": 1}, {"expert_parallel": 2}, {"mode": "fsdp"}]
)
def test_one_ranks_nan_makes_all_skip_and_nothing_move(ranks, parallel, name):
    results = ranks(2).run(skip_case, parallel, name)
    assert results[0] == results[1]
    applied, unchanged, where, after, norm = results[0]
    assert not applied
    assert unchanged
    expected = "the first value that is not finite is the router of blocks.2.feed_forward on rank 1"
    assert where == expected
    assert after
    assert norm == norm


def zero_window_case(rank: Runtime) -> tuple[float, bool]:
    step = build(rank, model_config(), {"expert_parallel": 2}, {"name": "adamw"})
    window = window_of(0, rank.rank, rank.world_size, 4)
    for micro_batch in window:
        micro_batch.labels_BS.fill_(-100)
    before = owned(step)
    output = step(window, 0.0)
    return float(output.grad_norm), owned(step) == before and int(output.tokens) == 0


def test_a_window_without_labels_gives_zero_gradients(ranks):
    assert ranks(2).run(zero_window_case) == [(0.0, True)] * 2


def decay_case(rank: Runtime, name: str) -> dict[str, float]:
    """By what factor each parameter shrinks in a step without gradients."""
    optim = {"name": name, "weight_decay": 0.5, "no_decay": ["*norm*", "embedding.*"]}
    step = build(rank, model_config(), {}, optim)
    before = [shard.main.clone() for shard in step.optimizer.shards]
    window = window_of(0, 0, 1, 4)
    for micro_batch in window:
        micro_batch.labels_BS.fill_(-100)
    step(window, 0.1)
    pairs = zip(step.optimizer.shards, before, strict=True)
    return {s.name: float((s.main / old).nanmean()) for s, old in pairs}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weights_decay_and_norms_and_embeddings_do_not(ranks, name):
    factors = ranks(1).run(decay_case, name)[0]
    free = {each for each in factors if "norm" in each or each == "embedding.weight"}
    assert {"norm.weight", "blocks.0.attention.q_norm.weight", "embedding.weight"} <= free
    for each, factor in factors.items():
        assert factor == pytest.approx(1.0 if each in free else 0.95, rel=1e-6), each
