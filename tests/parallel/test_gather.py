"""Phase gather: weights arrive during the next forward. Runs on gloo."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from olmo_shard.config import ModelConfig
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.distributed.work import Work
from olmo_shard.nn.transformer import Transformer
from olmo_shard.parallel import gather
from olmo_shard.parallel.gather import first_readers
from tests.support.tiny import (
    build,
    figures,
    model_config,
    owned,
    train,
    window_of,
)

MODELS = {
    "moe": {},
    "dense": {"moe": None, "n_dense_layers": 0},
    "tied": {"tie_embeddings": True},
    "post-norm": {"norm_position": "post", "qk_norm": "full"},
    "no shared expert": {"moe": {"num_shared_experts": 0}},
}


def late_model(config: ModelConfig) -> Transformer:
    """A model whose weights are NaN until their readers are called."""
    torch.manual_seed(0)
    model = Transformer(config)
    for router in model.routers():
        router.reset_buffers()
    values = {name: torch.rand_like(p) / 10 for name, p in model.named_parameters()}
    readers = first_readers(model)
    assert readers.keys() == values.keys()
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, torch.nan)

        def arrive(_: nn.Module, __: Any, name: str = name) -> None:
            with torch.no_grad():
                model.get_parameter(name).copy_(values[name])

        readers[name].register_forward_pre_hook(arrive)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_no_weight_is_read_before_its_reader_is_called(name):
    model = late_model(model_config(**MODELS[name]))
    tokens = window_of(0, 0, 1, 4, ignored=False)[0]
    with torch.no_grad():
        output = model(*tokens)
        assert output.loss.isfinite()
        assert output.counts_LE.isfinite().all()
    late = late_model(model_config(**MODELS[name]))
    with torch.no_grad():
        assert late.logits(tokens.tokens_BS).isfinite().all()
    for parameter in model.parameters():
        assert parameter.isfinite().all(), "no reader of a parameter was called"


class Poisoned:
    """Stands for an all-gather that arrives at the last moment: NaN before, values after."""

    def __init__(self, flat: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.flat, self.group, self.own = flat, group, own.clone()
        flat.fill_(torch.nan)
        flat.view(group.size(), -1)[group.rank()] = self.own

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        parts = [torch.empty_like(self.own) for _ in range(self.group.size())]
        dist.all_gather(parts, self.own, group=self.group)
        self.flat.data.copy_(torch.cat(parts))  # a receive leaves no trace in autograd either


def late_gather(
    flat: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, *, kind: str
) -> Work:
    return Work(kind, flat.device, Poisoned(flat, own, group))


def late_case(rank: Runtime, parallel: dict[str, Any], late: bool) -> Any:
    """Three steps, and everything that reads weights besides a training step."""
    parallel = {**parallel, "ddp": {"bucket_cap_mb": 0.01}}
    step = build(rank, model_config(), parallel, {"name": "adamw"})
    original = gather.all_gather_start
    gather.all_gather_start = late_gather if late else original
    try:
        found: list[Any] = [figures(output) for output in train(step, rank, 3, 4, lr=1e-2)]
        with torch.no_grad():  # an evaluation
            found.append(float(step.model(*window_of(9, 0, 1, 4)[0]).loss))
        train(step, rank, 1, 4, lr=1e-2, start=3)
        found.append({name: w.tolist() for name, w in step.model.state_dict().items()})
        train(step, rank, 1, 4, lr=1e-2, start=4)
        step.optimizer.parallel_model.wait()
        found.append({name: p.tolist() for name, p in step.model.named_parameters()})
    finally:
        gather.all_gather_start = original
    return found, owned(step)


@pytest.mark.parametrize(
    "parallel",
    [
        {"expert_parallel": 2},
        {"expert_parallel": 1, "activation_checkpointing": "full"},
        {"expert_parallel": 2, "compute_dtype": "bfloat16"},
    ],
)
def test_whoever_reads_weights_waits_for_them(ranks, parallel):
    """Gathers that complete only when awaited, on weights poisoned until then."""
    expected = ranks(2).run(late_case, parallel, False)
    assert ranks(2).run(late_case, parallel, True) == expected


def hidden_case(rank: Runtime, overlap: bool) -> tuple[int, int, int]:
    """Gathers under way after a step, after a forward, and after ``wait``."""
    parallel = {"ddp": {"bucket_cap_mb": 0.01, "overlap_param_gather": overlap}}
    step = build(rank, model_config(), parallel, {"name": "sgd"})
    train(step, rank, 1, 4)
    under_way = step.optimizer.parallel_model._gather._under_way  # type: ignore[attr-defined]
    after_step = len(under_way)
    with torch.no_grad():
        step.model(*window_of(1, 0, 1, 4)[0])
    after_forward = len(under_way)
    train(step, rank, 1, 4)
    step.optimizer.parallel_model.wait()
    return after_step, after_forward, len(under_way)


def test_a_step_leaves_its_gathers_to_the_next_forward(ranks):
    for after_step, after_forward, after_wait in ranks(2).run(hidden_case, True):
        assert after_step > 10
        assert (after_forward, after_wait) == (0, 0)
    assert ranks(2).run(hidden_case, False) == [(0, 0, 0)] * 2


def slices_case(rank: Runtime) -> list[list[str]]:
    step = build(rank, model_config(), {"ddp": {"bucket_cap_mb": 0.01}}, {"name": "sgd"})
    return [[shard.name for shard in part.shards] for part in step.optimizer.slices]


def test_slices_come_in_the_order_of_forward(ranks):
    slices = ranks(1).run(slices_case)[0]
    assert len(slices) > 10
    assert "embedding.weight" in slices[0]
    assert "lm_head.weight" in slices[-1]
    blocks = [
        {int(name.split(".")[1]) for name in names if name.startswith("blocks.")}
        for names in slices
    ]
    found = [(min(each), max(each)) for each in blocks if each]
    assert all(before[1] <= after[0] for before, after in pairwise(found))
