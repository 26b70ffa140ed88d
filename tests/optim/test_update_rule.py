"""Update rules: AdamW against torch's, SGD by hand, segments, and a rule that is one class."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from olmo_shard.config import OptimConfig
from olmo_shard.data.loader import LoaderState
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.kernels.backend import Backend
from olmo_shard.optim.adamw import AdamW
from olmo_shard.optim.parameter_groups import GroupSettings
from olmo_shard.optim.rules import RULES
from olmo_shard.optim.sgd import SGD
from olmo_shard.optim.update_rule import (
    OptimizerSlice,
    Segment,
    StepScalars,
    UpdateRule,
    make_slice,
)
from olmo_shard.parallel.shards import OwnedSlice, ParameterShard
from olmo_shard.train.checkpoint import Checkpointer
from olmo_shard.train.state import TrainState
from tests.support.close import close
from tests.support.tiny import build, model_config, owned, train

CONFIG = OptimConfig(beta1=0.8, beta2=0.9, eps=1e-6)
DECAY, NO_DECAY = GroupSettings(1.0, 0.1), GroupSettings(1.0, 0.0)
SLOW, SLOW_NO_DECAY = GroupSettings(0.25, 0.3), GroupSettings(0.5, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainSlice(OwnedSlice):
    """An owned slice whose gradient a test sets."""

    grad: Tensor

    def gradient(self) -> Tensor:
        return self.grad


def slice_of(
    rule: UpdateRule, main: Tensor, segments: list[Segment], model_copy: Tensor | None = None
) -> tuple[OptimizerSlice, PlainSlice]:
    plain = PlainSlice(main=main, model_copy=model_copy, shards=(), grad=torch.zeros_like(main))
    state = rule.init_state(main)
    return OptimizerSlice(owned=plain, state=state, segments=tuple(segments)), plain


def run(rule: UpdateRule, part: OptimizerSlice, plain: PlainSlice, grad: Tensor, **kw: Any) -> None:
    """One step with a gradient."""
    values = {"lr": 0.01, "divisor": 1.0, "skip": 0.0, "step": 1.0} | kw
    lr = values.pop("lr")
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    plain.grad.copy_(grad)
    scalars = StepScalars(lr=lr, **tensors)
    rule.begin_step(scalars)
    rule.update(part, scalars)


def adamw_case(_: Any, backend: Backend) -> None:
    """Five steps of a slice with four settings, one of them in two segments; 10 elements at the
    end are padding.
    """
    torch.manual_seed(0)
    main, model = torch.randn(1000), torch.zeros(1000, dtype=torch.bfloat16)
    main[990:] = 0
    scale = main.abs() + 5 * 0.01  # an update is at most about lr, whatever cancels in the moments
    segments = [
        Segment(300, DECAY),
        Segment(200, NO_DECAY),
        Segment(150, SLOW),
        Segment(150, DECAY),
        Segment(200, SLOW_NO_DECAY),
    ]
    sizes = [segment.numel for segment in segments]
    parameters = [torch.nn.Parameter(view.clone()) for view in main.split(sizes)]
    groups = [
        {
            "params": [parameter],
            "lr": 0.01 * segment.settings.lr_multiplier,
            "weight_decay": segment.settings.weight_decay,
        }
        for parameter, segment in zip(parameters, segments, strict=True)
    ]
    torchs = torch.optim.AdamW(groups, betas=(CONFIG.beta1, CONFIG.beta2), eps=CONFIG.eps)
    rule = AdamW(CONFIG, backend)
    part, plain = slice_of(rule, main, segments, model)
    for step in range(1, 6):
        gradient = torch.randn(1000)
        gradient[990:] = 0
        for parameter, grad in zip(parameters, gradient.split(sizes), strict=True):
            parameter.grad = grad / 2
        torchs.step()
        run(rule, part, plain, gradient, divisor=2.0, step=float(step))
    close(main, torch.cat([parameter.detach() for parameter in parameters]), scale=scale)
    assert main[990:].count_nonzero() == 0
    # Triton's interpreter rounds to bf16 in another way than torch.
    close(model, main.bfloat16(), scale=main.abs())


def test_adamw_equals_torchs_with_param_groups() -> None:
    adamw_case(None, "reference")


def test_the_triton_kernel_equals_torchs_with_param_groups(interpreted: Any) -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux alone")
    interpreted(1).run(adamw_case, "triton")


def test_sgd_by_hand() -> None:
    """lr 0.5, divisor 2: [1, 2, 3] with gradients [4, 8, 4], multipliers 1, 1, 0.5."""
    main, model = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, dtype=torch.bfloat16)
    rule = SGD(CONFIG, "reference")
    segments = [Segment(1, DECAY), Segment(1, NO_DECAY), Segment(1, GroupSettings(0.5, 0.2))]
    part, plain = slice_of(rule, main, segments, model)
    run(rule, part, plain, torch.tensor([4.0, 8.0, 4.0]), lr=0.5, divisor=2.0)
    expected = [0.95 * 1 - 1.0, 2.0 - 2.0, 0.95 * 3 - 0.5]
    close(main, torch.tensor(expected), scale=torch.tensor([1.95, 4.0, 3.35]))
    assert torch.equal(model, main.bfloat16())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_skipped_step_moves_nothing(name: str, bad: float) -> None:
    rule = RULES[name](CONFIG, "reference")
    part, plain = slice_of(rule, torch.tensor([1.0, 2.0]), [Segment(2, DECAY)])
    for position, tensor in enumerate(part.state.values()):
        tensor.add_(torch.tensor([0.1, 0.2]) + position)
    before = {kind: tensor.clone() for kind, tensor in part.tensors().items()}
    run(rule, part, plain, torch.tensor([bad, 1.0]), divisor=bad, skip=1.0)
    assert all(torch.equal(before[kind], tensor) for kind, tensor in part.tensors().items())


def shard(name: str, start: int, numel: int) -> ParameterShard:
    return ParameterShard(name=name, shape=torch.Size([numel]), chunks=((0, numel),), start=start)


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        ((), [(192, NO_DECAY)]),
        ((shard("a", 0, 60), shard("b", 64, 60)), [(192, DECAY)]),
        ((shard("a", 64, 60), shard("norm", 128, 5)), [(128, DECAY), (64, NO_DECAY)]),
        (
            (shard("norm", 0, 5), shard("slow", 64, 5), shard("norm2", 128, 5)),
            [(64, NO_DECAY), (64, SLOW), (64, NO_DECAY)],
        ),
    ],
    ids=["padding alone", "one setting", "padding before and after", "three runs"],
)
def test_segments_cover_a_slice(
    shards: tuple[ParameterShard, ...], expected: list[tuple[int, GroupSettings]]
) -> None:
    """Neighbours with the same settings are one segment; padding goes with what is before it."""
    settings = {"a": DECAY, "b": DECAY, "norm": NO_DECAY, "norm2": NO_DECAY, "slow": SLOW}
    flat = torch.zeros(192)
    plain = PlainSlice(main=flat, model_copy=None, shards=shards, grad=flat)
    part = make_slice(plain, SGD(CONFIG, "reference"), settings)
    assert part.segments == tuple(Segment(*pair) for pair in expected)


def test_every_rule_of_the_config_is_registered_and_no_other() -> None:
    assert set(get_args(OptimConfig.model_fields["name"].annotation)) == set(RULES)


class Lion(UpdateRule):
    """Lion (Chen et al., 2023), as a user would add it: this class and a line in ``RULES``."""

    state_names = ("exp_avg",)

    def update(self, part: OptimizerSlice, scalars: StepScalars) -> None:
        beta1, beta2, skip = self.config.beta1, self.config.beta2, scalars.skip
        grad = part.owned.gradient() / (1 if scalars.divisor is None else scalars.divisor)
        flats = part.owned.main, grad, part.state["exp_avg"]
        for settings, lists in part.split(*flats):
            lr = scalars.lr * settings.lr_multiplier
            for weights, g, m in zip(*lists, strict=True):
                sign = (beta1 * m + (1 - beta1) * g).sign()
                new = weights * (1 - lr * settings.weight_decay) - lr * sign
                weights.copy_(torch.where(skip == 0, new, weights))
                m.copy_(torch.where(skip == 0, beta2 * m + (1 - beta2) * g, m))
        part.owned.update_model()


LOADER = LoaderState(
    drawn=[5],
    seed=1,
    sequence_length=12,
    document_masking=False,
    sources={},
    weights=[1.0],
    since_drawn=[0],
)


def lion_case(rank: Runtime, parallel: dict[str, Any], where: str) -> tuple[Any, Any, list[str]]:
    """Four steps; then two steps, a checkpoint, and two steps after it was loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "sgd", Lion)
        step = build(rank, model_config(), parallel, {"name": "sgd"})
        train(step, rank, 2, 4, lr=1e-3)
        checkpointer = Checkpointer(step.optimizer)
        path = checkpointer.save(Path(where), TrainState(step=2), LOADER)
        train(step, rank, 2, 4, lr=1e-3, start=2)
        straight = owned(step)
        again = build(rank, model_config(), parallel, {"name": "sgd"}, seed=99)
        Checkpointer(again.optimizer).load(path)
        train(again, rank, 2, 4, lr=1e-3, start=2)
    keys = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return straight, owned(again), sorted({key.split(".")[0] for key in keys})


@pytest.mark.parametrize(
    "parallel", [{"expert_parallel": 2}, {"mode": "fsdp"}], ids=["ddp", "fsdp"]
)
def test_a_rule_is_one_class_and_its_state_is_in_the_checkpoint(
    ranks: Any, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    for straight, resumed, kinds in ranks(2).run(lion_case, parallel, str(tmp_path)):
        assert resumed == straight
        assert kinds == ["buffer", "exp_avg", "model"]
        assert all(math.isfinite(v) for chunks in straight.values() for _, c in chunks for v in c)
