"""Parameter groups: the first match wins, every pattern matches, and training follows torch's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from olmo_shard.config import OptimConfig
from olmo_shard.data.loader import LoaderState
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import ConfigurationError
from olmo_shard.optim.parameter_groups import (
    GroupSettings,
    describe_groups,
    group_parameters,
)
from olmo_shard.train.checkpoint import Checkpointer
from olmo_shard.train.state import TrainState
from tests.support.close import same_weights
from tests.support.configs import write_config
from tests.support.ties import assert_no_near_tie, watched_margins
from tests.support.tiny import (
    assemble,
    build,
    figures,
    main_weights,
    model_config,
    owned,
    train,
    window_of,
)

SIZES = {
    "embedding.weight": 100,
    "blocks.0.norm.weight": 5,
    "blocks.0.router.gate.weight": 20,
    "blocks.0.w_up.weight": 50,
    "lm_head.weight": 100,
}


def grouped(**fields: Any) -> dict[str, GroupSettings]:
    """Settings of each parameter: learning-rate multiplier and weight decay."""
    groups = group_parameters(SIZES, OptimConfig.model_validate(fields))
    return {name: group.settings for group in groups for name in group.sizes}


def test_without_groups_no_decay_decides() -> None:
    assert grouped(weight_decay=0.2) == {
        "embedding.weight": (1.0, 0.0),
        "blocks.0.norm.weight": (1.0, 0.0),
        "blocks.0.router.gate.weight": (1.0, 0.2),
        "blocks.0.w_up.weight": (1.0, 0.2),
        "lm_head.weight": (1.0, 0.2),
    }


def test_the_first_match_wins_and_a_groups_weight_decay_beats_no_decay() -> None:
    """``blocks.*`` does not reach the router, and leaves the norm without decay."""
    groups = [
        {"match": ["*.router.*"], "lr_multiplier": 0.1, "weight_decay": 0.0},
        {"match": ["blocks.*", "lm_head.*"], "lr_multiplier": 2.0},
        {"match": ["embedding.*"], "lr_multiplier": 0.5, "weight_decay": 0.3},
    ]
    assert grouped(weight_decay=0.2, groups=groups) == {
        "embedding.weight": (0.5, 0.3),
        "blocks.0.norm.weight": (2.0, 0.0),
        "blocks.0.router.gate.weight": (0.1, 0.0),
        "blocks.0.w_up.weight": (2.0, 0.2),
        "lm_head.weight": (2.0, 0.2),
    }


def test_the_log_has_one_line_per_group() -> None:
    fields = {"groups": [{"match": ["*.router.*"], "lr_multiplier": 0.1}], "weight_decay": 0.2}
    lines = describe_groups(group_parameters(SIZES, OptimConfig.model_validate(fields)))
    assert lines == [
        "group     no_decay (*norm*, *bias, embedding.*): 2 tensor(s), 105 parameters, lr x 1, "
        "weight decay 0",
        "group     groups.0 (*.router.*): 1 tensor(s), 20 parameters, lr x 0.1, weight decay 0.2",
        "group     all others: 2 tensor(s), 150 parameters, lr x 1, weight decay 0.2",
    ]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([["*router*"], ["lm_hed.*"]], r"groups\.1\.match: the pattern lm_hed\.\* .*is lm_head\."),
        ([["*router*", "*bias"]], r"optim\.groups\.0\.match: the pattern \*bias matches no"),
        ([["blocks.*"], ["*router*"]], r"optim\.groups\.1 has no parameter: earlier groups match"),
    ],
)
def test_a_group_that_has_no_effect_is_an_error(patterns: list[list[str]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        grouped(groups=[{"match": names} for names in patterns])


def test_check_reports_groups_and_refuses_a_pattern_without_a_match(
    main: Any, tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    override = "optim.groups=[{match: [embedding.*], lr_multiplier: 0.5}]"
    code, printed = main("check", config, override)
    assert code == 0, printed
    assert "# group     groups.0 (embedding.*): 1 tensor(s)," in printed
    assert "parameters, lr x 0.5, weight decay 0\n" in printed
    code, printed = main("check", config, "optim.groups=[{match: [embeddings.*]}]")
    assert code == 2
    assert "the pattern embeddings.* matches no parameter" in printed
    assert "the nearest name is embedding.weight" in printed


EPS = 1e-3
"""As large as the gradients, so that Adam does not magnify the rounding of those near zero."""
GROUPS = {
    "name": "adamw",
    "max_grad_norm": 0.5,
    "eps": EPS,
    "weight_decay": 0.3,
    "groups": [
        {"match": ["embedding.*"], "lr_multiplier": 0.5},
        {"match": ["lm_head.*"], "lr_multiplier": 0.25, "weight_decay": 0.05},
        {"match": ["*.router.*"], "lr_multiplier": 2.0, "weight_decay": 0.0},
        {"match": ["*.experts.w_down"], "lr_multiplier": 0.0},
        {"match": ["*norm*"], "lr_multiplier": 1.5, "weight_decay": 0.1},
    ],
}
"""Seven distinct settings, ``no_decay`` included."""

MULTIPLIERS = {"embedding.": 0.5, "lm_head.": 0.25, ".router.": 2.0, ".experts.w_down": 0.0}
DECAYS = {"embedding.": 0.0, "lm_head.": 0.05, ".router.": 0.0, "norm": 0.1}
LR, STEPS = 3e-3, 4
ROUTER = {"bias_gamma": 0.0, "lb_loss_weight": 0.0}
"""Nothing but the optimizer moves between two steps."""


def group_case(rank: Runtime, parallel: dict[str, Any]) -> tuple[Any, Any]:
    step = build(rank, model_config(ROUTER), parallel, GROUPS)
    outputs = train(step, rank, STEPS, 4, lr=LR)
    return [figures(output) for output in outputs], owned(step)


def torchs_case(rank: Runtime) -> tuple[Any, dict[str, Tensor], float]:
    """``torch.optim.AdamW`` with param_groups on one rank, in a loop written by hand."""
    step = build(rank, model_config(ROUTER), {}, {"name": "sgd"})
    parameters = dict(step.model.named_parameters())

    def value(table: dict[str, float], name: str, default: float) -> float:
        return next((v for part, v in table.items() if part in name), default)

    groups = [
        {
            "params": [parameter],
            "lr": LR * value(MULTIPLIERS, name, 1.5 if "norm" in name else 1.0),
            "weight_decay": value(DECAYS, name, 0.3),
        }
        for name, parameter in parameters.items()
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=EPS)
    norms = []
    with watched_margins() as margins:
        for number in range(STEPS):
            window = window_of(number, 0, 1, 4)
            tokens = sum(int(batch.num_labelled()) for batch in window)
            step.optimizer.parallel_model.begin_window()
            for batch in window:
                (step.model(*batch).loss / tokens).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)))
            adamw.step()
    weights = {name: p.detach().flatten().clone() for name, p in parameters.items()}
    return norms, weights, margins.smallest


@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (1, {"mode": "ddp"}),
        (2, {"mode": "ddp", "expert_parallel": 2}),
        (1, {"mode": "fsdp"}),
        (2, {"mode": "fsdp"}),
    ],
)
def test_every_layout_trains_as_torchs_adamw_with_param_groups(
    ranks: Any, size: int, parallel: dict[str, Any]
) -> None:
    (expected, weights, margin) = ranks(1).run(torchs_case)[0]
    assert_no_near_tie(margin)
    parts = ranks(size).run(group_case, parallel)
    found = [norm for _, norm in parts[0][0]]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)
    same_weights(assemble([part[1] for part in parts]), weights)


LOADER = LoaderState(
    drawn=[5],
    seed=1,
    sequence_length=12,
    document_masking=False,
    sources={},
    weights=[1.0],
    since_drawn=[0],
)


def other_groups_case(rank: Runtime, where: str) -> tuple[bool, bool]:
    """A run with groups resumes without them, and the frozen experts then move."""
    step = build(rank, model_config(), {"expert_parallel": 2}, GROUPS)
    train(step, rank, 2, 4, lr=LR)
    path = Checkpointer(step.optimizer).save(Path(where), TrainState(step=2), LOADER)
    again = build(rank, model_config(), {"expert_parallel": 2}, {"name": "adamw"}, seed=99)
    Checkpointer(again.optimizer).load(path)
    same = owned(again) == owned(step)
    before = {name: main.clone() for name, (_, main) in main_weights(again).items()}
    train(again, rank, 1, 4, lr=LR, start=2)
    moved = [
        not torch.equal(main, before[name])
        for name, (_, main) in main_weights(again).items()
        if name.endswith("experts.w_down")
    ]
    return same, bool(moved) and all(moved)


def test_a_run_may_resume_with_other_groups(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(other_groups_case, str(tmp_path)) == [(True, True)] * 2
