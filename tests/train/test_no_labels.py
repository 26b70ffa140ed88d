"""A global batch in which no token has a label is no step, and a mean over no labels is null."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from olmo_shard.config import SpikeConfig, load_config
from olmo_shard.data.labels import IGNORE_INDEX
from olmo_shard.data.loader import MicroBatch
from olmo_shard.data.validation import open_validation
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import TrainingError
from olmo_shard.experiment import run
from olmo_shard.optim.spikes import SpikeFilter
from olmo_shard.parallel.apply import parallelize
from olmo_shard.train.evaluate import evaluate
from olmo_shard.train.records import read_records
from olmo_shard.train.step import TrainStep
from tests.support.configs import write_config
from tests.support.ranks import RankGroup, mesh_of
from tests.support.tiny import build, meta_model, model_config, train, window_of


def without_labels(window: list[MicroBatch]) -> list[MicroBatch]:
    return [
        batch._replace(labels_BS=torch.full_like(batch.labels_BS, IGNORE_INDEX)) for batch in window
    ]


def whole_state(step: TrainStep) -> list[Tensor]:
    """Copies of all that a step may move: weights, moments, Adam's t, bias, counts, filter."""
    optimizer, spikes = step.optimizer, step.spikes
    optimizer.parallel_model.wait()
    tensors = [*optimizer.exp_avgs, *optimizer.exp_avg_sqs, optimizer.step_count]
    tensors += [part.main for part in optimizer.slices]
    tensors += [*step.model.parameters(), *step.model.buffers()]
    tensors += [] if spikes is None else [spikes.values, spikes.count]
    return [tensor.detach().clone() for tensor in tensors]


def unlabelled_case(
    rank: Runtime, parallel: dict[str, Any], filtered: bool
) -> tuple[list[bool], list[bool], str]:
    """Two real steps, one without a label, one real step."""
    step = build(rank, model_config(), parallel, {"name": "adamw"})
    if filtered:
        step.spikes = SpikeFilter(SpikeConfig(window=8), torch.device("cpu"))
    outputs = train(step, rank, 2, 4, lr=1e-2)
    before = whole_state(step)
    window = window_of(2, rank.rank, rank.world_size, 4)
    outputs.append(step(without_labels(window), 1e-2))
    cause = step.skip_cause(outputs[-1])
    same = [torch.equal(a, b) for a, b in zip(before, whole_state(step), strict=True)]
    outputs += train(step, rank, 1, 4, lr=1e-2, start=3)
    return [bool(output.applied) for output in outputs], same, cause


@pytest.mark.parametrize(
    "parallel",
    [{"expert_parallel": 2}, {"mode": "fsdp", "fsdp": {"reshard": "window"}}],
    ids=["ddp", "fsdp"],
)
@pytest.mark.parametrize("filtered", [False, True], ids=["finite", "spikes"])
def test_a_global_batch_without_a_label_moves_nothing(
    ranks: Any, parallel: dict[str, Any], filtered: bool
) -> None:
    group: RankGroup = ranks(2)
    for applied, same, cause in group.run(unlabelled_case, parallel, filtered):
        assert applied == [True, True, False, True]
        assert same
        assert all(same)
        assert cause.startswith("no token of the global batch has a label")
        assert "data.sources" in cause


def one_label_case(rank: Runtime) -> bool:
    """Rank 0 alone has one label in its whole window."""
    step = build(rank, model_config(), {}, {"name": "adamw"})
    window = without_labels(window_of(0, rank.rank, rank.world_size, 4))
    if rank.rank == 0:
        window[-1].labels_BS[0, 0] = 1
    return bool(step(window, 1e-2).applied)


def test_one_label_on_one_rank_is_a_step(ranks: Any) -> None:
    assert ranks(2).run(one_label_case) == [True, True]


def config_of_single_tokens(folder: Path, *more: str) -> Any:
    """Training documents of one token each: with masking no token has a label."""
    path = write_config(folder)
    single = folder / "single.bin"
    np.zeros(20 * 16 + 1, dtype=np.uint16).tofile(single)
    overrides = [
        f"data.sources=[{{path: {single}, dtype: uint16, eos_id: 0}}]",
        f"data.validation={{single: {{path: {single}, dtype: uint16, eos_id: 0}}}}",
        "data.document_masking=true",
        "tracking.wandb=off",
        *more,
    ]
    return load_config(str(path), overrides)


def test_records_say_null_and_the_run_ends_with_a_message_about_the_data(tmp_path: Path) -> None:
    config = config_of_single_tokens(tmp_path, "train.max_skipped_steps=2", "eval.every=1")
    with pytest.raises(TrainingError, match="no token of the global batch has a label") as error:
        run(config)
    assert "3 steps in a row are more than train.max_skipped_steps = 2" in str(error.value)
    records = read_records(Path(config.run.dir) / "metrics.jsonl")
    assert [record["skipped_steps"] for record in records] == [1, 2, 3]
    means = ("loss", "lb_loss", "lb_loss_weighted", "router_z_loss", "load_max_over_mean")
    assert [record[name] for record in records for name in means] == [None] * 15
    evals = read_records(Path(config.run.dir) / "eval.jsonl")
    assert [record["eval/single"] for record in evals] == [None, None]


def test_a_run_of_skipped_steps_ends_with_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config_of_single_tokens(tmp_path, "train.steps=2"))
    printed = capsys.readouterr().out
    assert "last loss      no token has a label (step 2)" in printed
    assert "loss -" in printed


def evaluate_case(rank: Runtime, folder: str) -> dict[str, float | None]:
    config = config_of_single_tokens(Path(folder) / str(rank.rank))
    mesh = mesh_of(rank)
    parallel_model = parallelize(meta_model(config.model), mesh, config.parallel, seed=1)
    return evaluate(parallel_model, open_validation(config), mesh)


def test_a_validation_set_without_a_label_has_no_loss(ranks: Any, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    assert ranks(2).run(evaluate_case, str(tmp_path)) == [{"single": None}] * 2
