"""Phase gather: weights arrive during the next forward, and no module reads them earlier."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from olmo_shard.config import ModelConfig
from olmo_shard.config.model import MODEL_FAMILIES
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.distributed.work import Work
from olmo_shard.nn.attention import Attention, AttentionInputs
from olmo_shard.nn.families import build_model
from olmo_shard.nn.protocol import LanguageModel
from olmo_shard.nn.readers import ParameterReaders, parameter_readers
from olmo_shard.nn.transformer import Transformer
from olmo_shard.parallel import gather
from tests.support.tiny import (
    build,
    figures,
    model_config,
    owned,
    train,
    window_of,
)

MODELS: dict[str, dict[str, Any]] = {
    "moe": {},
    "dense": {"moe": None, "n_dense_layers": 0},
    "tied": {"tie_embeddings": True},
    "post-norm": {"norm_position": "post", "qk_norm": "full"},
    "no shared expert": {"moe": {"num_shared_experts": 0}},
    "reads another's weight, declared": {"family": "declared"},
    "reads another's weight, undeclared": {"family": "undeclared"},
}


class Undeclared(Attention):
    """The first block's attention, which also reads a weight of the last block's attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.lenders: list[Attention] = []  # A list, so that the lender is no module inside.

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        (lender,) = self.lenders
        return super().forward(x_BSD, inputs) * (1 + lender.wo.weight.mean())


class Declared(Undeclared):
    """The same reader of another module's weight, with a declaration of what it reads."""

    def parameter_readers(self) -> ParameterReaders:
        borrowed = [lender.wo.weight for lender in self.lenders]
        return [*super().parameter_readers(), (self, borrowed)]


class Family(Transformer):
    """A transformer whose first attention borrows a weight of the last."""

    first: type[Undeclared] = Undeclared

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        reader = self.first(config)
        reader.lenders.append(self.blocks[-1].get_submodule("attention"))  # type: ignore[arg-type]
        self.blocks[0].attention = reader

    def parameter_readers(self) -> ParameterReaders:
        return super().parameter_readers()


class DeclaredFamily(Family):
    """The family with the attention that declares what it reads."""

    first = Declared

    def parameter_readers(self) -> ParameterReaders:
        return super().parameter_readers()


MODEL_FAMILIES["undeclared"] = f"{__name__}:Family"
MODEL_FAMILIES["declared"] = f"{__name__}:DeclaredFamily"


def late_model(config: ModelConfig) -> LanguageModel:
    """A model whose weights are NaN until one of their readers is called."""
    torch.manual_seed(0)
    model = build_model(config)
    model.place_buffers(torch.device("cpu"))
    values = {name: torch.rand_like(p) / 10 for name, p in model.named_parameters()}
    readers = parameter_readers(model)
    assert readers.keys() == values.keys()
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, torch.nan)

        def arrive(_: nn.Module, __: Any, name: str = name) -> None:
            with torch.no_grad():
                model.get_parameter(name).copy_(values[name])

        for reader in readers[name]:
            reader.register_forward_pre_hook(arrive)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_no_weight_is_read_before_its_reader_is_called(name: str) -> None:
    model = late_model(model_config(**MODELS[name]))
    tokens = window_of(0, 0, 1, 4, ignored=False)[0]
    with torch.no_grad():
        output = model(*tokens)
    assert output.loss.isfinite()
    assert all(figure.isfinite().all() for figure in output.layers.values())
    for parameter in model.parameters():
        assert parameter.isfinite().all(), "no reader of a parameter was called"


@pytest.mark.parametrize("name", [name for name in MODELS if "undeclared" not in name])
def test_declared_readers_serve_logits_and_hidden_states_too(name: str) -> None:
    """Without the hooks of the whole model, which run around ``forward`` only."""
    tokens = window_of(0, 0, 1, 4, ignored=False)[0].tokens_BS
    with torch.no_grad():
        assert late_model(model_config(**MODELS[name])).logits(tokens).isfinite().all()
        assert late_model(model_config(**MODELS[name])).hidden(tokens).isfinite().all()


class Poisoned:
    """Stands for an all-gather that arrives at the last moment: NaN before, values after."""

    def __init__(self, flat: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
        self.flat, self.group, self.own = flat, group, own.clone()
        flat.fill_(torch.nan)
        flat.view(group.size(), -1)[group.rank()] = self.own

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        parts = [torch.empty_like(self.own) for _ in range(self.group.size())]
        dist.all_gather(parts, self.own, group=self.group)
        self.flat.data.copy_(torch.cat(parts))  # ``data``: a receive leaves no trace in autograd.


def late_gather(flat: Tensor, own: Tensor, group: dist.ProcessGroup, *, kind: str) -> Work:
    return Work(kind, flat.device, Poisoned(flat, own, group))


def late_case(rank: Runtime, model: dict[str, Any], parallel: dict[str, Any], late: bool) -> Any:
    """Training steps, and everything besides them that reads weights."""
    parallel = {**parallel, "ddp": {"bucket_cap_mb": 0.01}}
    step = build(rank, model_config(**model), parallel, {"name": "adamw"})
    original = gather.all_gather_start
    gather.all_gather_start = late_gather if late else original
    try:
        results: list[Any] = [figures(output) for output in train(step, rank, 3, 4, lr=1e-2)]
        batch = window_of(9, 0, 1, 4)[0]
        with torch.no_grad():  # an evaluation
            results.append(float(step.model(*batch).loss))
        for method in (step.model.hidden, step.model.logits):
            train(step, rank, 1, 4, lr=1e-2, start=3)
            with torch.no_grad():
                results.append(method(batch.tokens_BS).double().sum().item())
        train(step, rank, 1, 4, lr=1e-2, start=3)
        results.append({name: w.tolist() for name, w in step.model.state_dict().items()})
        train(step, rank, 1, 4, lr=1e-2, start=4)
        step.optimizer.parallel_model.wait_for_weights()
        results.append({name: p.tolist() for name, p in step.model.named_parameters()})
    finally:
        gather.all_gather_start = original
    return results, owned(step)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ({}, {"expert_parallel": 2}),
        ({}, {"expert_parallel": 1, "activation_checkpointing": "full"}),
        ({}, {"expert_parallel": 2, "compute_dtype": "bfloat16"}),
        ({"family": "declared"}, {"expert_parallel": 2}),
        ({"family": "undeclared"}, {"expert_parallel": 2}),
    ],
)
def test_every_reader_waits_for_its_weights(
    ranks: Any, model: dict[str, Any], parallel: dict[str, Any]
) -> None:
    """Gathers that complete only when they are awaited, on weights that are NaN until then."""
    expected = ranks(2).run(late_case, model, parallel, False)
    assert ranks(2).run(late_case, model, parallel, True) == expected


def under_way_case(rank: Runtime, family: str, overlap: bool) -> tuple[int, int, int, int]:
    """Gathers under way after a step, before block 1, after a forward and after the wait."""
    parallel = {"ddp": {"bucket_cap_mb": 0.01, "overlap_param_gather": overlap}}
    step = build(rank, model_config(family=family), parallel, {"name": "sgd"})
    train(step, rank, 1, 4)
    under_way = step.optimizer.parallel_model._gather._under_way  # type: ignore[attr-defined]
    after_step = len(under_way)
    before_block: list[int] = []
    handle = step.model.blocks[1].register_forward_pre_hook(
        lambda *_: before_block.append(len(under_way))
    )
    with torch.no_grad():
        step.model(*window_of(1, 0, 1, 4)[0])
    handle.remove()
    after_forward = len(under_way)
    train(step, rank, 1, 4)
    step.optimizer.parallel_model.wait_for_weights()
    return after_step, before_block[0], after_forward, len(under_way)


def test_a_step_leaves_its_gathers_to_the_next_forward(ranks: Any) -> None:
    for family in ("transformer", "declared"):
        for after_step, before_block, after_forward, after_wait in ranks(2).run(
            under_way_case, family, True
        ):
            assert after_step > before_block > 5
            assert (after_forward, after_wait) == (0, 0)
    assert ranks(2).run(under_way_case, "transformer", False) == [(0, 0, 0, 0)] * 2


def test_a_model_with_undeclared_code_waits_for_all_weights_before_its_forward(ranks: Any) -> None:
    for after_step, before_block, _, _ in ranks(2).run(under_way_case, "undeclared", True):
        assert after_step > 10
        assert before_block == 0


def slices_case(rank: Runtime) -> list[list[str]]:
    step = build(rank, model_config(), {"ddp": {"bucket_cap_mb": 0.01}}, {"name": "sgd"})
    return [[shard.name for shard in s.shards] for s in step.optimizer.parallel_model.slices]


def test_slices_come_in_the_order_of_forward(ranks: Any) -> None:
    slices = ranks(1).run(slices_case)[0]
    assert len(slices) > 10
    assert "embedding.weight" in slices[0]
    assert "lm_head.weight" in slices[-1]
    blocks = [
        {int(name.split(".")[1]) for name in names if name.startswith("blocks.")}
        for names in slices
    ]
    spans = [(min(indices), max(indices)) for indices in blocks if indices]
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
