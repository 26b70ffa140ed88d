"""The commands as a person types them, run in this process."""

import resource
import signal

import pytest
import torch

from olmo_shard.config import load_config
from olmo_shard.errors import ConfigurationError
from olmo_shard.train import preflight as preflight_module
from olmo_shard.train import trainer as trainer_module
from olmo_shard.train.checkpoint_folder import complete_checkpoints, read_state
from olmo_shard.train.run_folder import open_run
from tests.support.commands import losses, records
from tests.support.configs import write_config, write_tokens


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, main):
    config = write_config(tmp_path)
    assert main("train", config, "train.steps=6")[0] == 0
    straight = losses(tmp_path / "run")
    arguments = [config, f"run.dir={tmp_path / 'two'}", "schedule.total_steps=6"]
    assert main("train", *arguments, "train.steps=3")[0] == 0
    assert main("train", *arguments, "train.steps=6")[0] == 0
    assert losses(tmp_path / "two") == straight


def test_steps_after_the_checkpoint_are_done_and_recorded_once(tmp_path, main):
    config = write_config(tmp_path)
    assert main("train", config, "train.steps=6")[0] == 0
    straight = losses(tmp_path / "run")
    newest = complete_checkpoints(tmp_path / "run")[-1]
    newest.rename(newest.with_name("step-00000006.partial"))
    code, printed = main("train", config, "train.steps=6")
    assert code == 0, printed
    assert "resume    step 3 of 6" in printed
    assert losses(tmp_path / "run") == straight


def test_the_default_saves_at_the_end_and_says_so(tmp_path, main):
    config = write_config(tmp_path)
    config.write_text(config.read_text().replace("checkpoint:\n  every: 3\n", ""))
    code, printed = main("train", config, "train.steps=2", "checkpoint.keep_last=1")
    assert code == 0, printed
    assert f"saves     at the end only, keeps the newest 1: {tmp_path}/run/checkpoints" in printed
    (saved,) = complete_checkpoints(tmp_path / "run")
    assert saved.name == "step-00000002"


def test_an_unfinished_save_is_named_at_the_start_and_removed_after_a_complete_one(tmp_path, main):
    config = write_config(tmp_path)
    folder = tmp_path / "run" / "checkpoints"
    for name in ("step-00000001.partial", "step-00000009.old", "step-00000003.mine"):
        (folder / name).mkdir(parents=True)
    line = (
        "leftover  saves that did not end: step-00000001.partial, step-00000009.old; "
        "the next complete save removes them"
    )
    assert f"# {line}" in main("check", config)[1]
    code, printed = main("train", config, "train.steps=3")
    assert code == 0, printed
    assert line in printed
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000003.mine"]
    assert "leftover" not in main("train", config, "train.steps=4")[1]


def test_a_second_start_keeps_the_records_of_the_first(tmp_path, main):
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


def test_a_resume_from_another_folder_keeps_the_records_here(tmp_path, main):
    config = write_config(tmp_path)
    assert main("train", config, "train.steps=3", f"run.dir={tmp_path / 'a'}")[0] == 0
    run = [f"run.dir={tmp_path / 'b'}", "checkpoint.every=null", "train.steps=4"]
    assert main("train", config, *run)[0] == 0
    source = complete_checkpoints(tmp_path / "a")[-1]
    code, printed = main("train", config, *run, f"checkpoint.resume={source}")
    assert code == 0, printed
    assert len(losses(tmp_path / "b" / "earlier-1")) == 4
    assert len(losses(tmp_path / "b")) == 1


@pytest.mark.parametrize("mode", ["mode=ddp", "fsdp.reshard=window"])
def test_evaluation_changes_nothing(tmp_path, main, mode):
    config = write_config(tmp_path)
    shared = [f"parallel.{mode}", "parallel.mode=" + ("ddp" if "ddp" in mode else "fsdp")]
    found = []
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
        found.append(losses(run))
    assert found[0] == found[1]


def test_init_from_starts_a_new_run_from_weights(tmp_path, main):
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.stepz=1"], r"train.stepz: unknown key"),
        (["parallel.expert_parallel=2"], r"expert_parallel = 2 does not divide the 1 rank"),
        (["train.global_batch_tokens=100"], r"100 is not a multiple of ranks x"),
        (["model.vocab_size=40"], r"is outside the vocabulary of 40 ids"),
        (["data.sources.0.path=none.bin"], r"no such file or folder: none.bin"),
        (["checkpoint.resume=/nowhere"], r"checkpoint /nowhere: no such checkpoint"),
        (["checkpoint.init_from=/nowhere"], r"checkpoint /nowhere: no such checkpoint"),
        (["train.steps=null", "train.epochs=0.01"], r"less than one step"),
        (["schedule.warmup_steps=7"], "schedule.warmup_steps = 7 do not fit into 6 steps"),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_mistakes_end_in_one_message_and_exit_code_2(tmp_path, main, command, arguments, message):
    if command == "check" and "expert_parallel" in arguments[0]:
        arguments = [*arguments, "--nproc", "1"]
    code, printed = main(command, write_config(tmp_path), *arguments)
    assert code == 2
    assert printed.startswith("olmo-shard: ")
    assert message in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.threads=100000", "run.threads = 100000 is more than the"),
        ("run.device=cuda", "run.device = cuda, but torch finds no CUDA device"),
    ],
)
def test_training_wants_what_this_machine_has_and_a_check_does_not(
    tmp_path, main, override, message, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = write_config(tmp_path)
    code, printed = main("train", config, override)
    assert (code, message in printed) == (2, True)
    assert main("check", config, override)[0] == 0


def test_launchers_do_not_mix(tmp_path, main, monkeypatch):
    config = write_config(tmp_path)
    monkeypatch.setenv("RANK", "0")
    code, printed = main("train", config)
    assert (code, "WORLD_SIZE is missing, although RANK is set" in printed) == (2, True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    code, printed = main("train", config, "--nproc", "2")
    assert (code, "drop --nproc, or unset RANK and WORLD_SIZE" in printed) == (2, True)


def test_a_finished_run_does_not_report_success_again(tmp_path, main):
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


def test_steps_that_diverge_are_skipped_and_then_end_the_run(tmp_path, main):
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


def test_spikes_are_skipped_and_named_and_the_window_survives_a_resume(tmp_path, main):
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


def test_a_step_read_late_is_still_recorded(tmp_path, main, monkeypatch):
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


def test_an_older_checkpoint_is_not_continued_beside_later_ones(tmp_path, main):
    config = write_config(tmp_path)
    assert main("train", config, "train.steps=6")[0] == 0
    first, last = complete_checkpoints(tmp_path / "run")
    code, printed = main("train", config, f"checkpoint.resume={first}")
    assert (code, f"holds the later {last.name}" in printed) == (2, True)
    code, printed = main("train", config, f"checkpoint.resume={first}", f"run.dir={tmp_path / 'b'}")
    assert code == 0, printed
    assert [r["step"] for r in records(tmp_path / "b")] == [4, 5, 6]


def test_a_run_folder_is_for_one_job(tmp_path, main):
    config = load_config(str(write_config(tmp_path)))
    with open_run(config):
        code, printed = main("train", tmp_path / "config.yaml")
    assert (code, "is in use by another job" in printed) == (2, True)
    assert main("train", tmp_path / "config.yaml")[0] == 0


def test_a_full_disk_is_an_error_before_training(tmp_path):
    config = load_config(str(write_config(tmp_path)))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with (
            pytest.raises(
                ConfigurationError, match=r"run\.dir = .*/run cannot be written: File too"
            ),
            open_run(config),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("kind", ["file", "below a file", "bad record"])
def test_a_run_folder_that_cannot_be_used(tmp_path, main, kind):
    config = write_config(tmp_path)
    run = tmp_path / "run"
    message = "is not a folder"
    if kind == "bad record":
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"step": 1}\ngarbage\n')
        message = "metrics.jsonl line 2 is no record of a step"
    elif kind == "file":
        run.write_text("")
    else:
        run = tmp_path / "tokens.bin" / "run"
    code, printed = main("train", config, f"run.dir={run}")
    assert (code, message in printed, "Traceback" in printed) == (2, True, False), printed


def test_an_id_found_while_reading_names_its_place(tmp_path, main, monkeypatch):
    """Of data too large to scan before training, ids are checked as they are read."""
    config = write_config(tmp_path)
    write_tokens(tmp_path / "tokens.bin", vocab=65)
    monkeypatch.setattr(preflight_module, "SCAN_LIMIT_BYTES", 0)
    code, printed = main("train", config)
    assert code == 2
    assert "id 64 at offset" in printed
    assert "Traceback" not in printed


def test_version_and_help(main):
    code, printed = main("--version")
    assert code == 0
    assert printed.strip().count(".") >= 1
    code, printed = main("--help")
    assert all(command in printed for command in ("prepare", "check", "train"))
