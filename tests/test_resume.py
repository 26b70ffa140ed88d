"""Starts and resumes by the command: which steps are done, and which records are kept."""

from pathlib import Path

from olmo_shard.train.checkpoint_folder import complete_checkpoints
from tests.support.commands import Main, losses, records
from tests.support.configs import write_config


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, main: Main) -> None:
    config = write_config(tmp_path)
    assert main("train", config, "train.steps=6")[0] == 0
    straight = losses(tmp_path / "run")
    arguments = [config, f"run.dir={tmp_path / 'two'}", "schedule.total_steps=6"]
    assert main("train", *arguments, "train.steps=3")[0] == 0
    assert main("train", *arguments, "train.steps=6")[0] == 0
    assert losses(tmp_path / "two") == straight


def test_steps_after_the_checkpoint_are_done_and_recorded_once(tmp_path: Path, main: Main) -> None:
    config = write_config(tmp_path)
    assert main("train", config, "train.steps=6")[0] == 0
    straight = losses(tmp_path / "run")
    newest = complete_checkpoints(tmp_path / "run")[-1]
    newest.rename(newest.with_name("step-00000006.partial"))
    code, printed = main("train", config, "train.steps=6")
    assert code == 0, printed
    assert "resume    step 3 of 6" in printed
    assert losses(tmp_path / "run") == straight


def test_a_second_start_keeps_the_records_of_the_first(tmp_path: Path, main: Main) -> None:
    config = write_config(tmp_path)
    assert main("train", config, "train.steps=2", "checkpoint.every=null")[0] == 0
    run = tmp_path / "run"
    before = (run / "metrics.jsonl").read_bytes(), (run / "eval.jsonl").read_bytes()
    code, printed = main("train", config, "train.steps=2", "checkpoint.every=null", "run.seed=9")
    assert code == 0, printed
    assert f"records   of an earlier start in {run} are now in {run}/earlier-1" in printed
    earlier = run / "earlier-1"
    assert (
        (earlier / "metrics.jsonl").read_bytes(),
        (earlier / "eval.jsonl").read_bytes(),
    ) == before
    assert "seed: 3" in (earlier / "config.yaml").read_text()
    assert "seed: 9" in (run / "config.yaml").read_text()
    assert losses(run) != losses(earlier)


def test_a_resume_from_another_folder_keeps_the_records_here(tmp_path: Path, main: Main) -> None:
    config = write_config(tmp_path)
    assert main("train", config, "train.steps=3", f"run.dir={tmp_path / 'a'}")[0] == 0
    run = [f"run.dir={tmp_path / 'b'}", "checkpoint.every=null", "train.steps=4"]
    assert main("train", config, *run)[0] == 0
    source = complete_checkpoints(tmp_path / "a")[-1]
    code, printed = main("train", config, *run, f"checkpoint.resume={source}")
    assert code == 0, printed
    assert len(losses(tmp_path / "b" / "earlier-1")) == 4
    assert len(losses(tmp_path / "b")) == 1


def test_init_from_starts_a_new_run_from_weights(tmp_path: Path, main: Main) -> None:
    config = write_config(tmp_path)
    assert main("train", config, "train.steps=6")[0] == 0
    source = complete_checkpoints(tmp_path / "run")[-1]
    code, printed = main(
        "train", config, f"run.dir={tmp_path / 'tuned'}", f"checkpoint.init_from={source}"
    )
    assert code == 0, printed
    assert f"start     new run, weights from {source}" in printed
    first, again = records(tmp_path / "run"), records(tmp_path / "tuned")
    assert again[0]["loss"] < first[0]["loss"]
    assert [r["lr"] for r in again] == [r["lr"] for r in first]
    assert again[0]["tokens_total"] == 256


def test_a_finished_run_does_not_report_success_again(tmp_path: Path, main: Main) -> None:
    config = write_config(tmp_path)
    assert main("train", config)[0] == 0
    code, printed = main("train", config)
    assert (code, "nothing to train" in printed) == (2, True)
    code, printed = main("check", config)
    assert (code, "# nothing to train" in printed) == (0, True)
    code, printed = main("train", config, "checkpoint.resume=never")
    assert (code, "checkpoint.resume = never, but run.dir" in printed) == (2, True)
    before = (tmp_path / "run" / "config.yaml").read_text()
    code, printed = main("train", config, "train.steps=9", "model.rope_theta=5e5")
    assert (code, "model.rope_theta = 500000.0 instead of 10000.0" in printed) == (2, True)
    code, printed = main("train", config, "train.steps=9", "run.seed=4")
    assert (code, "run.seed = 4, but the checkpoint was trained with 3" in printed) == (2, True)
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    code, printed = main("train", config, "train.steps=7", "optim.lr=5e-3")
    assert code == 0
    assert "cosine: 2 warm-up steps to 0.005" in printed, "an override shows in the schedule"


def test_an_older_checkpoint_is_not_continued_beside_later_ones(tmp_path: Path, main: Main) -> None:
    config = write_config(tmp_path)
    assert main("train", config, "train.steps=6")[0] == 0
    first, last = complete_checkpoints(tmp_path / "run")
    code, printed = main("train", config, f"checkpoint.resume={first}")
    assert (code, f"holds the later {last.name}" in printed) == (2, True)
    code, printed = main("train", config, f"checkpoint.resume={first}", f"run.dir={tmp_path / 'b'}")
    assert code == 0, printed
    assert [r["step"] for r in records(tmp_path / "b")] == [4, 5, 6]
