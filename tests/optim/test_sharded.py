"""The distributed optimizer: clipping, skipping, decay. Runs on gloo."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from olmo_shard.config import OptimConfig, SpikeConfig
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.optim.sharded import DistributedOptimizer
from olmo_shard.optim.spikes import SpikeFilter
from tests.support.close import close
from tests.support.ranks import mesh_of
from tests.support.tiny import (
    build,
    mains,
    model_config,
    moe_layer,
    owned,
    small_model,
    train,
    window_of,
)


def clip_case(rank: Runtime, limit: float | None) -> tuple[float, float, float]:
    """The gradient norm, and squared norms of this rank's update and of its weights."""
    optim = {"name": "sgd", "max_grad_norm": limit, "weight_decay": 0.0}
    step = build(rank, model_config(), {"expert_parallel": rank.world_size}, optim)
    before = [part.main.clone() for part in step.optimizer.slices]
    (output,) = train(step, rank, 1, 4, lr=1.0)
    moved = sum(
        float((part.main - old).double().square().sum())
        for part, old in zip(step.optimizer.slices, before, strict=True)
    )
    weights = sum(float(old.double().square().sum()) for old in before)
    return float(output.grad_norm), moved, weights


@pytest.mark.parametrize("size", [1, 2])
def test_clipping_bounds_the_whole_models_update(ranks, size):
    """An update is read from the difference of two weights, whose rounding scales with them."""
    parts, free = ranks(size).run(clip_case, 0.01), ranks(size).run(clip_case, None)
    assert parts[0][0] > 0.1
    for found, expected in ((parts, 0.01), (free, free[0][0])):
        moved, weights = (sum(part[i] for part in found) ** 0.5 for i in (1, 2))
        update = torch.tensor(moved), torch.tensor(expected)
        close(*update, scale=weights + expected, dtype=torch.float32)


def skip_case(rank: Runtime, parallel: dict[str, Any], name: str) -> tuple[Any, ...]:
    """Rank 1's second micro-batch meets a NaN before the router of the last layer."""
    step = build(rank, model_config(), parallel, {"name": name})
    train(step, rank, 1, 4, lr=1e-2)

    def state() -> list[torch.Tensor]:
        optimizer = step.optimizer
        moments = [*optimizer.exp_avgs, *optimizer.exp_avg_sqs, optimizer.step_count]
        weights = [part.main for part in optimizer.slices]
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
    where = step.skip_cause(output)
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
    expected = "gradient norm nan; the first value that is not finite is the router of "
    expected += "blocks.2.feed_forward on rank 1"
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


class Narrow(nn.Module):
    """Three elements: of a bucket's slices on four ranks one holds them, three hold padding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))


def narrow_case(rank: Runtime, name: str) -> tuple[int, list[float]]:
    """Shards that this rank owns, and the weights after two steps with gradient 4 (1 a rank)."""
    model, parallel_model = small_model(rank, Narrow())
    optim = OptimConfig.model_validate({"name": name, "weight_decay": 0.0, "max_grad_norm": None})
    optimizer = DistributedOptimizer(parallel_model, mesh_of(rank), optim)
    for _ in range(2):
        parallel_model.begin_window()
        parallel_model.begin_microbatch(last=True)
        (model.norm + model.weight).sum().backward()
        optimizer.step(0.125)
    parallel_model.wait()
    return len(parallel_model.shards()), [*model.norm.tolist(), *model.weight.tolist()]


@pytest.mark.parametrize(("name", "expected"), [("sgd", 0.0), ("adamw", 0.75)])
def test_a_rank_may_own_padding_alone(ranks, name, expected):
    results = ranks(4).run(narrow_case, name)
    assert [shards for shards, _ in results] == [2, 0, 0, 0]
    for _, weights in results:
        close(torch.tensor(weights), torch.full((6,), expected), scale=1.0)


def decay_case(rank: Runtime, name: str) -> dict[str, float]:
    """By what factor each parameter shrinks in a step without gradients."""
    optim = {"name": name, "weight_decay": 0.5, "no_decay": ["*norm*", "embedding.*"]}
    step = build(rank, model_config(), {}, optim)
    before = {name: main.clone() for name, (_, main) in mains(step).items()}
    # A window without a backward: every gradient is zero.
    step.optimizer.parallel_model.begin_window()
    assert step.optimizer.step(0.1).applied
    return {name: float((main / before[name]).nanmean()) for name, (_, main) in mains(step).items()}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weights_decay_and_norms_and_embeddings_do_not(ranks, name):
    factors = ranks(1).run(decay_case, name)[0]
    free = {each for each in factors if "norm" in each or each == "embedding.weight"}
    assert {"norm.weight", "blocks.0.attention.q_norm.weight", "embedding.weight"} <= free
    for each, factor in factors.items():
        expected = torch.tensor(1.0 if each in free else 0.95)
        close(torch.tensor(factor), expected, scale=1.0, what=each)


class NoHostRead(TorchDispatchMode):
    """Raises where a value of a tensor is read to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, (
            "a value was read to the host"
        )
        return func(*args, **(kwargs or {}))


def host_read_case(rank: Runtime, parallel: dict[str, Any]) -> bool:
    """Two whole steps of a dense model with clipping and a spike filter (expert sizes are read)."""
    dense = model_config(moe=None, n_dense_layers=0)
    step = build(rank, dense, parallel, {"name": "adamw", "max_grad_norm": 1e-3})
    step.spikes = SpikeFilter(SpikeConfig(window=2), torch.device("cpu"))
    train(step, rank, 1, 4)
    windows = [window_of(i, rank.rank, rank.world_size, 4) for i in range(2)]

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a tensor was read to the host")

    originals = {name: getattr(Tensor, name) for name in ("tolist", "cpu", "numpy")}
    for name in originals:
        setattr(Tensor, name, refuse)
    try:
        with NoHostRead():
            outputs = [step(window, 1e-3) for window in windows]
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)
    return all(bool(output.applied) for output in outputs)


@pytest.mark.parametrize(
    "parallel",
    [
        {"ddp": {"bucket_cap_mb": 0.01}},
        {"ddp": {"wire_dtype": "bfloat16"}, "compute_dtype": "bfloat16"},
        {"mode": "fsdp"},
    ],
)
def test_a_step_reads_nothing_to_the_host(ranks, parallel):
    assert ranks(2).run(host_read_case, parallel) == [True, True]


def test_the_guard_sees_host_reads():
    with NoHostRead(), pytest.raises(AssertionError):
        bool(torch.ones(()) > 0)
