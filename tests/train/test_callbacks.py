"""Records, events, console and pictures."""

import dataclasses
import io
import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

import olmo_shard
from olmo_shard.config import load_config
from olmo_shard.train.callbacks import RunInfo
from olmo_shard.train.callbacks.console import Console, print_summary
from olmo_shard.train.callbacks.events import Events
from olmo_shard.train.callbacks.expert_map import ExpertMap
from olmo_shard.train.callbacks.jsonl import JsonLines
from olmo_shard.train.callbacks.wandb import flatten
from olmo_shard.train.records import perplexity, read_records, to_json
from olmo_shard.train.rewind import Rewound
from olmo_shard.train.state import TrainState
from tests.support.configs import write_config

RECORD = {
    "step": 1, "loss": 2.5, "grad_norm": 1.0, "lr": 0.1, "tokens": 10, "tokens_total": 10,
    "step_seconds": 0.5, "tokens_per_second": 20.0, "mfu": None, "skipped_steps": 0,
}  # fmt: skip


def run_info(tmp_path: Path, step: int = 0) -> RunInfo:
    config = load_config(str(write_config(tmp_path)), ["tracking.wandb=offline"])
    (tmp_path / "run").mkdir(exist_ok=True)
    return RunInfo(
        config=config,
        run_dir=tmp_path / "run",
        total_steps=9,
        state=TrainState(step=step),
        notes=["a note"],
    )


def test_records_are_continued_after_a_resume(tmp_path: Path) -> None:
    info = run_info(tmp_path, step=2)
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    writer = JsonLines()
    writer.on_start(info)
    writer.on_step({"step": 3, "again": True})
    writer.on_end()
    assert read_records(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_an_evaluation_has_perplexity_and_the_tokens_axis(tmp_path: Path) -> None:
    info = run_info(tmp_path, step=2)
    info.state.tokens = 512
    writer = JsonLines()
    writer.on_start(info)
    writer.on_eval(2, {"held_out": math.log(8), "empty": None})
    writer.on_end()
    (record,) = read_records(tmp_path / "run" / "eval.jsonl")
    assert record.pop("eval_perplexity/held_out") == pytest.approx(8)
    assert record == {
        "step": 2, "tokens_total": 512, "eval/held_out": math.log(8), "eval/empty": None,
        "eval_perplexity/empty": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(0.0, 1.0), (700.0, math.exp(700.0))]
    + [(bad, None) for bad in (710.0, math.inf, math.nan, None)],
)
def test_perplexity_is_null_where_it_is_no_number(
    loss: float | None, expected: float | None
) -> None:
    assert perplexity(loss) == expected


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (lambda events: events.on_end(), "the previous start reached its end, step 4"),
        (
            lambda events: events.on_failure(ValueError("a b")),
            "the previous start failed at step 4: ValueError: a b",
        ),
        (lambda events: None, "the previous start was ended from outside: it recorded no end"),
    ],
)
def test_a_resume_says_from_where_with_which_layout_and_why(
    tmp_path: Path, ending: Callable[[Events], None], reason: str
) -> None:
    first = Events()
    first.on_start(run_info(tmp_path, step=4))
    first.on_note("a note")
    ending(first)
    info = dataclasses.replace(
        run_info(tmp_path, step=2),
        ranks=2,
        checkpoint=Path("step-00000002"),
        rewound=Rewound(last_step=4, replaced={"metrics.replaced.jsonl": 2}),
    )
    Events().on_start(info)
    start, note, *_, resume = read_records(tmp_path / "run" / "events.jsonl")
    assert (start["event"], start["step"], start["ranks"]) == ("start", 4, 1)
    assert (note["event"], note["message"]) == ("note", "a note")
    assert datetime.fromisoformat(resume.pop("time")).tzinfo is not None
    assert resume == {
        "step": 2, "event": "resume", "version": olmo_shard.__version__,
        "checkpoint": "step-00000002", "reason": reason, "mode": "ddp", "ranks": 2,
        "expert_parallel": 1, "compute_dtype": "float32", "last_recorded_step": 4,
        "replaced": {"metrics.replaced.jsonl": 2},
    }  # fmt: skip


def test_the_load_of_experts_is_drawn_at_the_end(tmp_path: Path) -> None:
    expert_map = ExpertMap()
    expert_map.on_start(run_info(tmp_path))
    assert expert_map.on_end() == [], "a dense model has no experts"
    line = {"step": 9, "first_step": 1, "layers": [1, 2], "counts": [[6, 0, 1, 1], [0, 0, 0, 0]]}
    expert_map.on_experts(line)
    path = tmp_path / "run" / "experts.png"
    assert expert_map.on_end() == [("expert load", str(path))]
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_figures_that_are_not_finite_are_null_in_json() -> None:
    record = {"step": 1, "grad_norm": float("nan"), "lb_loss": [1.0, float("inf")]}
    assert to_json(record) == '{"step": 1, "grad_norm": null, "lb_loss": [1.0, null]}'


@pytest.mark.parametrize("terminal", [False, True])
def test_console_shows_the_figures(tmp_path: Path, terminal: bool) -> None:
    buffer = io.StringIO()
    rich = RichConsole(file=buffer, force_terminal=terminal, width=160, highlight=False)
    console = Console(rich)
    console.on_start(run_info(tmp_path))
    console.on_step(RECORD)
    console.on_eval(1, {"held_out": 2.25})
    console.on_end()
    print_summary(rich, [("first loss", "2.5"), ("run", "x")])
    printed = buffer.getvalue()
    for part in ("a note", "loss 2.5000", "20 tokens/s", "validation held_out: loss 2.2500"):
        assert part in printed
    if not terminal:
        assert "step 1/9" in printed
        assert "ETA 0:00:04" in printed
        assert "\x1b" not in printed


def test_layers_become_metrics_of_their_own() -> None:
    record = {"step": 3, "dead_experts": [0, 2], "wire_bytes_by_kind": {"reduce": 8}}
    assert flatten(record) == {
        "step": 3,
        "wire_bytes_by_kind/reduce": 8,
        "moe/0/dead_experts": 0,
        "moe/1/dead_experts": 2,
    }
