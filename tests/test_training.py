"""Training by the command: evaluation, skipped steps, and records that are written late."""

from pathlib import Path

import pytest

from olmo_shard.train import trainer as trainer_module
from olmo_shard.train.checkpoint_folder import complete_checkpoints, read_state
from tests.support.commands import Main, losses, records
from tests.support.configs import write_config


@pytest.mark.parametrize("mode", ["mode=ddp", "fsdp.reshard=window"])
def test_evaluation_changes_nothing(tmp_path: Path, main: Main, mode: str) -> None:
    config = write_config(tmp_path)
    shared = [f"parallel.{mode}", "parallel.mode=" + ("ddp" if "ddp" in mode else "fsdp")]
    runs = []
    for name, every in (("with", 1), ("without", 0)):
        run = tmp_path / name
        code, printed = main(
            "train",
            config,
            *shared,
            f"run.dir={run}",
            f"eval.every={every}",
            "checkpoint.every=null",
        )
        assert code == 0, printed
        assert not (run / "checkpoints").exists()
        assert "saves     nothing, not even at the end (checkpoint.every = null)" in printed
        runs.append(losses(run))
    assert runs[0] == runs[1]


def test_steps_that_diverge_are_skipped_and_then_end_the_run(tmp_path: Path, main: Main) -> None:
    code, printed = main(
        "train",
        write_config(tmp_path),
        "optim.lr=1e38",
        "train.max_skipped_steps=2",
        "train.steps=20",
    )
    assert code == 1
    assert "Traceback" not in printed
    assert "3 steps in a row are more than train.max_skipped_steps = 2" in printed
    assert "skipped: gradient norm" in printed
    assert records(tmp_path / "run")[-1]["skipped_steps"] == 3


def test_spikes_are_skipped_and_named_and_the_window_survives_a_resume(
    tmp_path: Path, main: Main
) -> None:
    """A window of two and a tiny sigma: about every second step is a spike."""
    config = write_config(tmp_path)
    spikes = "train.skip_spikes={watch: loss, window: 2, sigmas: 0.01}"
    arguments = [config, spikes, "train.max_skipped_steps=9", "optim.lr=1e-9"]
    arguments.append("schedule.total_steps=8")
    code, printed = main("train", *arguments, "train.steps=8")
    assert code == 0, printed
    assert "is above" in printed
    assert "mean + 0.01 standard deviations of the last 2 steps" in printed
    straight = [(r["step"], r["loss"], r["skipped_steps"]) for r in records(tmp_path / "run")]
    assert 1 <= straight[-1][2] <= 6
    other = [*arguments, f"run.dir={tmp_path / 'two'}"]
    for steps in (3, 8):
        assert main("train", *other, f"train.steps={steps}")[0] == 0
    resumed = [(r["step"], r["loss"], r["skipped_steps"]) for r in records(tmp_path / "two")]
    assert resumed == straight
    states = [
        read_state(complete_checkpoints(tmp_path / name)[-1]).train.spike_window
        for name in ("run", "two")
    ]
    assert states[0] == states[1]
    assert [len(row) for row in states[0]] == [2, 2]
    # A run without the filter leaves no window that a later one would take for the newest steps.
    assert main("train", *other, "train.skip_spikes=null", "train.steps=9")[0] == 0
    last = read_state(complete_checkpoints(tmp_path / "two")[-1])
    assert (last.train.step, last.train.spike_window) == (9, [[], []])


def test_a_step_read_late_is_still_recorded(
    tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: figures are read after the next step is queued, and the last one at the end."""
    monkeypatch.setattr(trainer_module, "reads_late", lambda device: True)
    config = write_config(tmp_path)
    for name, steps in (("one", 1), ("five", 5)):
        run = tmp_path / name
        overrides = [
            f"run.dir={run}",
            f"train.steps={steps}",
            "eval.every=0",
            "checkpoint.every=null",
            "schedule.warmup_steps=1",
        ]
        assert main("train", config, *overrides)[0] == 0
        assert [r["step"] for r in records(run)] == list(range(1, steps + 1))
