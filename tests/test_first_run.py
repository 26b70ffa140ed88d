"""A newcomer's first run: prepare, check, train on two ranks, resume twice; and what it leaves."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from olmo_shard.config import load_config
from tests.support.commands import finish, records, start
from tests.support.configs import write_config
from tests.support.wandb_segment import segment_steps

PNG = b"\x89PNG\r\n\x1a\n"
FIELDS = {
    "step", "loss", "perplexity", "grad_norm", "lr", "tokens", "tokens_total", "step_seconds",
    "tokens_per_second", "mfu", "wire_bytes", "exposed_seconds", "skipped_steps", "memory_bytes",
    "load_max_over_mean", "dead_experts", "expert_bias_range", "lb_loss", "router_z_loss",
}  # fmt: skip


@dataclass(frozen=True)
class FirstRun:
    """A run of 15 steps in three starts, which end at steps 6, 10 and 15."""

    folder: Path
    """The run's folder."""
    outputs: list[str]
    """What each start printed."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return records(self.folder)

    @property
    def summary(self) -> str:
        """The summary of the last start."""
        return self.outputs[2].split("first loss")[1]


def command(*arguments: object) -> str:
    """Run a command in another process and return its output."""
    code, output = finish(start(*arguments), seconds=300)
    assert code == 0, output
    return output


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> FirstRun:
    """The whole way, with W&B offline: 256 tokens per step, top-2 of 4 experts on 2 ranks."""
    tmp_path = tmp_path_factory.mktemp("first_run")
    text, data = tmp_path / "text.txt", tmp_path / "data"
    text.write_text("\n".join(f"line {i} of a small text about nothing much" for i in range(900)))
    assert "1 documents" in command("prepare", text, "--train-bpe", "300", "--out", data)
    config = write_config(tmp_path)
    (tmp_path / "text.txt.bin").write_bytes((data / "train.bin").read_bytes())
    overrides = [
        f"data.sources=[{{path: {data}}}]",
        f"data.validation={{text: {{path: {text}.bin, dtype: uint16}}}}",
        "model.vocab_size=300",
        "parallel.expert_parallel=2",
        "tracking.wandb=offline",
        "optim.lr=2e-2",
    ]
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(command("check", config, *overrides))
    assert load_config(str(resolved)) == load_config(str(config), overrides)
    outputs = [
        command("train", config, *overrides, f"train.steps={steps}", "--nproc", "2")
        for steps in (6, 10, 15)
    ]
    return FirstRun(tmp_path / "run", outputs)


def test_each_start_says_what_it_does_and_the_run_learns(first_run: FirstRun) -> None:
    run, outputs, steps = first_run.folder, first_run.outputs, first_run.steps
    assert "start     new run" in outputs[0]
    assert (
        "dispatch  rowwise (parallel.dispatch = auto): "
        "mailboxes of 2 buffers x 1 peer(s) x 32 rows x 144 B = 9,344 bytes (9.1 KiB) per rank; "
    ) in outputs[0]
    assert f"resume    step 6 of 10, from {run}/checkpoints/step-00000006" in outputs[1]
    assert "validation text: loss" in outputs[2]
    assert re.search(rf"loss curve +{run}/loss\.png\n", first_run.summary)
    assert (run / "loss.png").read_bytes().startswith(PNG)
    assert [r["step"] for r in steps] == list(range(1, 16))
    assert set(steps[0]) >= FIELDS
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["perplexity"] == pytest.approx(math.exp(steps[-1]["loss"]))
    assert [r["tokens_total"] for r in steps] == [256 * (i + 1) for i in range(15)]
    assert all(len(r["load_max_over_mean"]) == 1 for r in steps)


def test_each_step_has_the_bytes_and_the_waits_of_its_transfers(first_run: FirstRun) -> None:
    """Each rank sends half of the dense gradients, half of the dense weights, and token rows."""
    dense = 300 * 32 * 2 + 2 * (32 * 32 * 2 + 32 * 16 * 2) + 3 * 32 * 48 + 3 * 32 * 16
    steps = first_run.steps
    assert "gather" not in steps[0]["exposed_seconds_by_kind"], "no step before has sent weights"
    assert "gather" in steps[1]["exposed_seconds_by_kind"]
    for record in steps:
        by_kind = record["wire_bytes_by_kind"]
        assert by_kind["reduce"] == pytest.approx(dense * 4 / 2, rel=0.02)
        assert by_kind["gather"] == pytest.approx(dense * 4 / 2, rel=0.02)
        assert record["wire_bytes"] == sum(by_kind.values())
        assert by_kind.keys() == {"tokens", "control", "reduce", "gather", "rows", "metadata"}
        seconds = record["exposed_seconds_by_kind"]
        assert seconds.keys() <= by_kind.keys()
        assert 0 < record["exposed_seconds"] == sum(seconds.values()) < record["step_seconds"]
        assert record["waited_seconds"][0] <= record["waited_seconds_max"] < record["step_seconds"]
        assert record["waited_least_rank"] in (0, 1)


def test_each_step_has_the_token_rows_of_its_moe_layer(first_run: FirstRun) -> None:
    for record in first_run.steps:
        by_kind = record["wire_bytes_by_kind"]
        assert record["row_bytes"] == [by_kind["rows"] + by_kind["metadata"]]
        assert 0 < record["rows_sent"][0] <= 256, "a token at most once to the other rank"
        assert record["received_rows_mean"][0] <= record["received_rows_max"][0] <= 256
        assert 256 <= 2 * record["received_rows_mean"][0] <= 512, "each token on one rank or both"
        assert record["dropped_routes"] == [0]


def test_evaluations_expert_loads_and_resumes_have_records(first_run: FirstRun) -> None:
    run = first_run.folder
    evals = records(run, "eval.jsonl")
    assert [r["step"] for r in evals] == [3, 6, 9, 10, 12, 15]
    assert [r["tokens_total"] for r in evals] == [256 * r["step"] for r in evals]
    experts = records(run, "experts.jsonl")
    assert [(r["first_step"], r["step"]) for r in experts] == [(1, 6), (7, 10), (11, 15)]
    for line in experts:
        (counts,) = line["counts"]
        routes = 2 * 256 * (line["step"] - line["first_step"] + 1)
        assert (line["layers"], len(counts), sum(counts)) == ([1], 4, routes), "top-2 of 4"
    assert (run / "experts.png").read_bytes().startswith(PNG)
    resumes = [r for r in records(run, "events.jsonl") if r["event"] == "resume"]
    layouts = [(r["step"], r["ranks"], r["expert_parallel"]) for r in resumes]
    assert layouts == [(6, 2, 2), (10, 2, 2)]
    assert resumes[1]["reason"] == "the previous start reached its end, step 10"
    assert resumes[1]["checkpoint"].endswith("step-00000010")


def test_each_start_leaves_one_offline_segment_of_one_run(first_run: FirstRun) -> None:
    segments = sorted(str(path) for path in (first_run.folder / "wandb").glob("offline-run-*"))
    assert len(segments) == 3, "one segment per start, from one rank"
    assert len({segment.rsplit("-", 1)[1] for segment in segments}) == 1, "one run id"
    assert f"wandb sync {' '.join(segments)}" in first_run.summary
    steps = [step for segment in segments for step in segment_steps(segment)]
    assert steps == list(range(1, 16)), "one axis over all segments"
