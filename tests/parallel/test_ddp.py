"""Mode ddp: views, types, unused parameters, memory, equality of experts. Runs on gloo."""

from typing import Any

import pytest
import torch
from torch import nn

from olmo_shard.config import ParallelConfig
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import ConfigurationError, TrainingError
from olmo_shard.nn.transformer import Transformer
from olmo_shard.parallel import flat_space
from olmo_shard.parallel.apply import parallelize
from olmo_shard.parallel.ddp import DDPModel
from olmo_shard.parallel.expert import shard_experts
from olmo_shard.parallel.shards import LogicalParameter
from tests.support.ranks import mesh_of
from tests.support.tiny import build, meta_model, model_config, train, window_of

BF16 = {"compute_dtype": "bfloat16", "expert_parallel": 2}


def views_case(rank: Runtime) -> None:
    step = build(rank, model_config(), BF16, {"name": "adamw"})
    parallel_model = step.optimizer.parallel_model
    assert isinstance(parallel_model, DDPModel)
    storages = {space.grads.untyped_storage().data_ptr() for space in parallel_model.spaces}
    train(step, rank, 1, 2, lr=1e-3)
    before = {name: p.grad for name, p in step.model.named_parameters()}
    train(step, rank, 2, 2, lr=1e-3)
    for name, parameter in step.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad is before[name], f"{name}: the gradient is a new tensor"
        assert parameter.grad.untyped_storage().data_ptr() in storages, name


def test_gradients_stay_fp32_views_of_the_flat_buffer(ranks):
    ranks(2).run(views_case)


def main_weights_case(rank: Runtime) -> None:
    step = build(rank, model_config(), BF16, {"name": "adamw"})
    train(step, rank, 3, 2, lr=1e-3)
    optimizer = step.optimizer
    for state in (
        *optimizer.exp_avgs,
        *optimizer.exp_avg_sqs,
        *(part.main for part in optimizer.slices),
    ):
        assert state.dtype == torch.float32
    differing = 0
    for part in optimizer.slices:
        assert torch.equal(part.model, part.main.bfloat16()), "not the rounded main weights"
        differing += int((part.model.float() != part.main).sum())
    assert differing > 1000, "main weights hold no more than the bf16 ones"
    for router in step.routers:
        assert router.expert_bias.dtype == router.lagged_counts.dtype == torch.float32


def test_bf16_keeps_fp32_main_weights_and_moments(ranks):
    ranks(2).run(main_weights_case)


def replicas_case(rank: Runtime) -> dict[str, list[float]]:
    step = build(rank, model_config(), {"expert_parallel": 2}, {"name": "adamw"})
    train(step, rank, 2, 4, lr=1e-2)
    step.optimizer.parallel_model.wait()
    return {name: p.flatten().tolist() for name, p in step.model.named_parameters()}


def test_dense_weights_are_equal_and_experts_differ(ranks):
    """Ranks 0, 2 hold the same experts, ranks 1, 3 the others (ep is innermost)."""
    weights = ranks(4).run(replicas_case)
    for name in weights[0]:
        if ".experts." in name:
            assert weights[0][name] == weights[2][name], name
            assert weights[1][name] == weights[3][name], name
            assert weights[0][name] != weights[1][name], name
        else:
            assert all(other[name] == weights[0][name] for other in weights[1:]), name


class TwoHeads(nn.Module):
    """Rank 0 uses one head, the others the other; one parameter is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 1, bias=False)
        self.second = nn.Linear(5, 1, bias=False)
        self.unused = nn.Parameter(torch.ones(3))


def unused_case(rank: Runtime) -> list[list[Any]]:
    mesh = mesh_of(rank)
    with torch.device("meta"):
        model = TwoHeads()
    config = ParallelConfig()
    parameters = shard_experts(model, mesh)

    def ones(logical: LogicalParameter) -> torch.Tensor:
        return torch.ones(logical.shape)

    parallel_model = DDPModel(model, mesh, config, parameters, ones)
    parallel_model.begin_window()
    head = model.first if rank.rank == 0 else model.second
    head(torch.full((1, 5), rank.rank + 1.0)).sum().backward()
    parallel_model.reduce()
    return [
        [shard.name, *shard.of(part.gradient()).tolist()]
        for part in parallel_model.slices
        for shard in part.shards
    ]


def test_parameters_that_a_rank_does_not_use_count_as_zero(ranks):
    pieces = [piece for part in ranks(3).run(unused_case) for piece in part]
    sums = {name: [] for name, *_ in pieces}
    for name, *values in pieces:
        sums[name] += values
    assert sums == {"first.weight": [1.0] * 5, "second.weight": [5.0] * 5, "unused": [0.0] * 3}


def fallback_case(rank: Runtime, has_grad_dtype: bool) -> list[float]:
    original, flat_space.HAS_GRAD_DTYPE = flat_space.HAS_GRAD_DTYPE, has_grad_dtype
    try:
        step = build(rank, model_config(), BF16, {"name": "sgd"})
        outputs = train(step, rank, 2, 2)
    finally:
        flat_space.HAS_GRAD_DTYPE = original
    return [float(output.grad_norm) for output in outputs]


def test_torch_without_grad_dtype_gives_the_same_gradients(ranks):
    assert ranks(2).run(fallback_case, False) == ranks(2).run(fallback_case, True)


def bytes_case(rank: Runtime, dtype: str, grad_dtype: str) -> tuple[int, int, int, int]:
    config = model_config(vocab_size=2048, d_model=64)
    parallel = {"compute_dtype": dtype, "expert_parallel": 2, "ddp": {"grad_dtype": grad_dtype}}
    step = build(rank, config, parallel, {"name": "adamw"})
    train(step, rank, 1, 4)
    optimizer, parallel_model = step.optimizer, step.optimizer.parallel_model
    assert isinstance(parallel_model, DDPModel)
    tensors = [t for space in parallel_model.spaces for t in (space.weights, space.grads)]
    tensors += [t for part in optimizer.slices for t in (part.main, part.gradient())]
    tensors += [*optimizer.exp_avgs, *optimizer.exp_avg_sqs]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    sizes = [p.numel() for name, p in step.model.named_parameters() if ".experts." not in name]
    experts = [p.numel() for name, p in step.model.named_parameters() if ".experts." in name]
    return sum(storages.values()), sum(sizes), sum(experts), rank.world_size


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "whole", "sharded"),
    [
        ("float32", "float32", 4 + 4, 8),
        ("float32", "bfloat16", 4 + 2, 12),
        ("bfloat16", "float32", 2 + 4, 12),
        ("bfloat16", "bfloat16", 2 + 2, 16),
    ],
)
def test_resident_bytes_follow_the_formula(ranks, dtype, grad_dtype, whole, sharded):
    """Weights and gradients on every rank; moments, main weights and main gradients over the group,
    as far as they are not views of the former.
    """
    total, dense, experts, size = ranks(4).run(bytes_case, dtype, grad_dtype)[0]
    expected = dense * (whole + sharded / size) + experts * (whole + sharded / (size // 2))
    assert total == pytest.approx(expected, rel=0.03)


def stolen_case(rank: Runtime) -> tuple[float, float]:
    """Norms of two equal steps; before the second, zero_grad takes the gradients' views away."""
    norms = []
    for steal in (False, True):
        step = build(rank, model_config(), {"expert_parallel": 2}, {"name": "sgd"})
        if steal:
            step.model.zero_grad(set_to_none=True)
        norms.append(float(train(step, rank, 1, 4)[0].grad_norm))
    return norms[0], norms[1]


def test_zero_grad_of_the_model_does_not_turn_training_off(ranks):
    for plain, stolen in ranks(2).run(stolen_case):
        assert plain == stolen > 0


def misuse_case(rank: Runtime) -> str:
    """zero_grad inside a window: what was summed so far would be lost without a word."""
    step = build(rank, model_config(), {"expert_parallel": 2}, {"name": "sgd"})
    parallel_model = step.optimizer.parallel_model
    parallel_model.begin_window()
    for micro_batch in window_of(0, rank.rank, rank.world_size, 4):
        step.model.zero_grad()
        step.model(*micro_batch).loss.backward()
    try:
        step.optimizer.step(0.1)
    except TrainingError as error:
        return str(error)
    return "trained"


def test_gradients_that_were_replaced_inside_a_window_are_noticed(ranks):
    for message in ranks(2).run(misuse_case):
        assert "gradients were replaced inside a window: call begin_window" in message


def real_case(rank: Runtime) -> list[str]:
    messages = []
    for model, parallel in [
        (Transformer(model_config()), {}),
        (meta_model(model_config()), {"expert_parallel": 2}),
        (meta_model(model_config(moe={"num_experts": 3})), {"expert_parallel": 2}),
    ]:
        mesh = mesh_of(rank, 2 if "num_experts=3" in str(model.config) else 1)
        try:
            parallelize(model, mesh, ParallelConfig.model_validate(parallel))
        except ConfigurationError as error:
            messages.append(str(error))
    return messages


def test_what_parallelize_cannot_spread_is_refused(ranks):
    for messages in ranks(2).run(real_case):
        assert "build the model under torch.device('meta')" in messages[0]
        assert messages[1] == "the mesh has expert_parallel = 1, the config 2"
        assert messages[2] == "expert_parallel = 2 does not divide num_experts = 3"
