"""Records, console, curve and W&B. Runs in CI."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from olmo_shard.config import load_config
from olmo_shard.train.callbacks import RunInfo
from olmo_shard.train.callbacks.console import Console, print_summary
from olmo_shard.train.callbacks.jsonl import JsonLines
from olmo_shard.train.callbacks.wandb import WandB, choose_mode, flatten
from olmo_shard.train.records import read_records, to_json
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


def test_records_beyond_the_resumed_step_and_cut_lines_are_dropped(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    info = run_info(tmp_path, step=2)
    path.write_text("".join(json.dumps({"step": i}) + "\n" for i in (1, 2, 3)) + '{"step": 4, "lo')
    writer = JsonLines()
    writer.on_start(info)
    writer.on_step({"step": 3, "again": True})
    writer.on_end()
    assert read_records(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_figures_that_are_not_finite_are_null_in_json():
    record = {"step": 1, "grad_norm": float("nan"), "lb_loss": [1.0, float("inf")]}
    assert to_json(record) == '{"step": 1, "grad_norm": null, "lb_loss": [1.0, null]}'


@pytest.mark.parametrize("terminal", [False, True])
def test_console_shows_the_figures(tmp_path, terminal):
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


class BrokenRun:
    offline, dir = True, "/x/files"
    url: str | None = "u"

    def __init__(self, broken: str) -> None:
        self.broken = broken

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            if name == self.broken:
                raise RuntimeError("no space left")

        return call


@pytest.mark.parametrize("broken", ["init", "define_metric", "log", "finish"])
def test_an_error_of_the_tracker_is_reported_once_and_ends_nothing(tmp_path, monkeypatch, broken):
    import wandb

    def init(**_: Any) -> BrokenRun:
        if broken == "init":
            raise OSError("no space left")
        return BrokenRun(broken)

    monkeypatch.setattr(wandb, "init", init)
    buffer = io.StringIO()
    tracker = WandB(RichConsole(file=buffer, width=200))
    tracker.on_start(run_info(tmp_path))
    for _ in range(3):
        tracker.on_step(RECORD)
    tracker.on_note("a note")
    tracker.on_end()
    assert buffer.getvalue().count("W&B stopped: ") == 1
    assert "no space left" in buffer.getvalue()


@pytest.mark.parametrize(
    ("url", "lines"), [(None, []), ("http://a/b", [("W&B run", "http://a/b")])]
)
def test_a_run_without_an_address_has_no_line_in_the_summary(tmp_path, monkeypatch, url, lines):
    import wandb

    run = BrokenRun("nothing")
    run.offline, run.url = False, url
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    tracker = WandB(RichConsole(file=io.StringIO()))
    tracker.on_start(run_info(tmp_path))
    assert tracker.on_end() == lines


def test_offline_without_a_key(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose_mode() == "offline"


def test_offline_with_a_key_but_without_the_server(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert choose_mode() == "offline"


def test_wandbs_own_variable_is_left_to_it(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_mode() is None


def test_layers_become_metrics_of_their_own():
    record = {"step": 3, "dead_experts": [0, 2], "wire_bytes_by_kind": {"reduce": 8}}
    assert flatten(record) == {
        "step": 3,
        "wire_bytes_by_kind/reduce": 8,
        "moe/0/dead_experts": 0,
        "moe/1/dead_experts": 2,
    }
