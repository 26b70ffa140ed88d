"""Phase reduce: overlapped with backward, in one order, in two types. Runs on gloo."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from olmo_shard.config import OptimConfig
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.distributed.work import Work
from olmo_shard.errors import TrainingError
from olmo_shard.optim.sharded import DistributedOptimizer
from olmo_shard.parallel import reduce
from olmo_shard.parallel.ddp import DDPModel
from olmo_shard.parallel.reduce import STAGED_BUCKETS
from tests.support.close import BARS
from tests.support.ranks import mesh_of
from tests.support.tiny import (
    SEQUENCES,
    build,
    figures,
    model_config,
    owned,
    small_model,
    train,
    window_of,
)

SMALL = 0.01
"""MiB: some twenty buckets."""


def options_case(rank: Runtime, ddp: dict[str, Any], parallel: dict[str, Any], micro: int) -> Any:
    parallel = {"expert_parallel": 2, **parallel, "ddp": {"bucket_cap_mb": SMALL, **ddp}}
    step = build(rank, model_config(), parallel, {"name": "adamw"})
    return [figures(output) for output in train(step, rank, 5, micro, lr=1e-2)], owned(step)


OFF = {"overlap_grad_reduce": False, "overlap_param_gather": False}


@pytest.mark.parametrize(
    ("size", "parallel", "micro"),
    [
        (2, {}, 4),
        (2, {"expert_parallel": 1, "activation_checkpointing": "full"}, 8),
        (4, {}, 1),
        (2, {"compute_dtype": "bfloat16"}, 4),
    ],
)
def test_overlap_changes_no_bit(ranks, size, parallel, micro):
    """Losses, norms and every weight after five steps, for each option and for both."""
    expected = ranks(size).run(options_case, OFF, parallel, micro)
    for name in OFF:
        assert ranks(size).run(options_case, {name: False}, parallel, micro) == expected
    assert ranks(size).run(options_case, {}, parallel, micro) == expected


def order_case(rank: Runtime, overlap: bool) -> tuple[list[list[str]], int, int, int]:
    """Buckets in the order of their starts, how many of them in backward, most under way."""
    parallel = {
        "expert_parallel": 2,
        "ddp": {"bucket_cap_mb": SMALL, "overlap_grad_reduce": overlap},
    }
    step = build(rank, model_config(), parallel, {"name": "sgd"})
    parallel_model = step.optimizer.parallel_model
    assert isinstance(parallel_model, DDPModel)
    reducer = parallel_model._reducer
    names = {id(bucket.grads): list(bucket.names) for bucket in reducer.buckets}
    started: list[list[str]] = []
    most = 0
    original = reduce.reduce_scatter_start

    def start(output: Any, flat: torch.Tensor, *args: Any, **kwargs: Any) -> Work:
        nonlocal most
        started.append(names[id(flat)])
        most = max(most, len(reducer._under_way) + 1)
        return original(output, flat, *args, **kwargs)

    reduce.reduce_scatter_start = start
    try:
        parallel_model.begin_window()
        window = window_of(0, rank.rank, rank.world_size, 4)
        for index, micro_batch in enumerate(window):
            parallel_model.begin_microbatch(last=index == len(window) - 1)
            step.model(*micro_batch).loss.backward()
            if index < len(window) - 1:
                assert not started, "a bucket was reduced before the last micro-batch"
        in_backward = len(started)
        parallel_model.reduce()
    finally:
        reduce.reduce_scatter_start = original
    return started, in_backward, len(reducer.buckets), most


def test_buckets_start_in_the_last_backward_in_one_order(ranks):
    results = ranks(4).run(order_case, True)
    for started, in_backward, buckets, most in results:
        assert started == results[0][0]
        assert len(started) == buckets > 10
        # How far it gets in backward depends on the network; the rest starts in ``finish``.
        assert in_backward >= most == STAGED_BUCKETS
    flat = [name for bucket in results[0][0] for name in bucket]
    assert flat.index("lm_head.weight") < flat.index("embedding.weight")
    # Both classes take turns: experts of the last layer before anything of the first.
    assert flat.index("blocks.2.feed_forward.experts.w_down") < flat.index(
        "blocks.0.attention.wq.weight"
    )


def test_without_overlap_nothing_starts_in_backward_and_one_bucket_is_staged(ranks):
    for started, in_backward, buckets, most in ranks(2).run(order_case, False):
        assert (in_backward, len(started), most) == (0, buckets, 1)


class Three(nn.Module):
    """Rank 1 does not use the second parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.empty(3)) for _ in range(3))


def summed(parallel_model: DDPModel) -> dict[str, list[float]]:
    return {
        shard.name: shard.of(part.gradient()).tolist()
        for part in parallel_model.slices
        for shard in part.shards
    }


def unused_case(rank: Runtime) -> dict[str, list[float]]:
    model, parallel_model = small_model(rank, Three())
    parallel_model.begin_microbatch(last=True)
    used = (model.a, model.c) if rank.rank == 1 else (model.a, model.b, model.c)
    torch.cat(used).sum().backward()
    parallel_model.reduce()
    return summed(parallel_model)


def test_a_parameter_that_a_rank_does_not_use_hangs_nothing(ranks):
    found = [name for part in ranks(3).run(unused_case) for name in part.items()]
    sums: dict[str, list[float]] = {}
    for name, values in found:
        sums[name] = sums.get(name, []) + values
    assert sums == {"a": [3.0] * 3, "b": [2.0] * 3, "c": [3.0] * 3}


def idle_case(rank: Runtime) -> list[float]:
    """Two steps of SGD in which no module's forward waits for any gather."""
    model, parallel_model = small_model(rank, Three())
    config = OptimConfig(name="sgd", weight_decay=0.0, max_grad_norm=None)
    optimizer = DistributedOptimizer(parallel_model, mesh_of(rank), config)
    for _ in range(2):
        parallel_model.begin_window()
        (model.a + model.b).sum().backward()
        optimizer.step(0.25)
    parallel_model.wait()
    return [*model.a.tolist(), *model.c.tolist()]


def test_weights_that_no_forward_has_waited_for_are_there_before_the_next_step(ranks):
    assert ranks(2).run(idle_case) == [[0.0] * 3 + [1.0] * 3] * 2


class Meeting(torch.autograd.Function):
    """All ranks meet in backward, as in an exchange of rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.distributed.barrier(group=ctx.group)
        return grads[0], None


class Chain(nn.Module):
    """Six parameters in a row; backward meets its peers before it reaches the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ParameterList(nn.Parameter(torch.empty(3)) for _ in range(6))


def meeting_case(rank: Runtime) -> list[float]:
    """Rank 1 does not use the last parameter, so it starts no bucket before its backward ends."""
    model, parallel_model = small_model(rank, Chain())
    parallel_model.begin_microbatch(last=True)
    x = torch.ones(3)
    for index, parameter in enumerate(model.steps):
        if index == 2:
            x = Meeting.apply(x, mesh_of(rank).control)
        if index < 5 or rank.rank != 1:
            x = x + parameter
    x.sum().backward()
    parallel_model.reduce()
    return [value for values in summed(parallel_model).values() for value in values]


def test_backward_does_not_wait_for_a_peer_that_waits_for_it(ranks):
    values = [value for part in ranks(2).run(meeting_case) for value in part]
    assert sorted(values) == [1.0] * 3 + [2.0] * 15


def given_up_case(rank: Runtime) -> dict[str, list[float]]:
    """A window that is given up after its backward, in which rank 1 started what it could, and rank
    0, too early, only what staging holds; then a whole one.
    """
    model, parallel_model = small_model(rank, Chain())
    for factor in (100.0, 1.0):
        parallel_model.begin_window()
        parallel_model.begin_microbatch(last=True)
        if rank.rank == 1:
            time.sleep(0.5)
        (factor * torch.stack(list(model.steps))).sum().backward()
    parallel_model.reduce()
    return summed(parallel_model)


def test_a_window_may_be_given_up(ranks):
    for sums in ranks(2).run(given_up_case):
        assert all(value == 2.0 for values in sums.values() for value in values)


def twice_case(rank: Runtime) -> str:
    model, parallel_model = small_model(rank, Three())
    parallel_model.begin_microbatch(last=True)
    model.a.sum().backward()
    (model.b + model.c).sum().backward()
    try:
        model.c.sum().backward()
    except TrainingError as error:
        return str(error)
    return "no error"


def test_a_gradient_after_its_buckets_reduce_is_an_error(ranks):
    for message in ranks(2).run(twice_case):
        assert message.startswith("a gradient of c came after its bucket was reduced")
        assert "set parallel.ddp.overlap_grad_reduce to false" in message


def types_case(rank: Runtime, ddp: dict[str, Any]) -> list[tuple[list[float], list[str]]]:
    """The first step's summed gradients, slice by slice, and their types."""
    parallel = {"expert_parallel": 2, "ddp": ddp}
    step = build(rank, model_config(), parallel, {"name": "sgd", "max_grad_norm": None})
    train(step, rank, 1, SEQUENCES // rank.world_size // 2, lr=0.0)
    return [
        (part.gradient().tolist(), [str(part.gradient().dtype), str(part.main.dtype)])
        for part in step.optimizer.slices
    ]


def gradients(ranks: Callable[[int], Any], size: int, ddp: dict[str, Any]) -> torch.Tensor:
    parts = [part for rank in ranks(size).run(types_case, ddp) for part in rank]
    assert all(types == ["torch.float32"] * 2 for _, types in parts)
    return torch.tensor([value for values, _ in parts for value in values])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("ddp", "roundings"), [({"wire_dtype": "bfloat16"}, 1), ({"grad_dtype": "bfloat16"}, 3)]
)
def test_bf16_gradients_are_off_by_their_rounding(ranks, size, ddp, roundings):
    """One rounding of each rank's sum on the wire; in grad_dtype two micro-batches are rounded,
    and so is their sum. In relation to the norm: a sum over ranks may cancel, an error does not.
    """
    exact, rounded = gradients(ranks, size, {}), gradients(ranks, size, ddp)
    error = (rounded - exact).norm() / exact.norm()
    rounding = BARS[torch.bfloat16].rounding
    assert rounding / 16 < error < roundings * rounding
    assert exact.count_nonzero() > 10_000
