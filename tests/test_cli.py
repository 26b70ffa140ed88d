"""The commands as a person types them. Few runs have several processes. Runs in CI."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from olmo_shard import cli
from olmo_shard.config import load_config
from olmo_shard.train import preflight as preflight_module
from olmo_shard.train import trainer as trainer_module
from olmo_shard.train.checkpoint_folder import complete_checkpoints
from olmo_shard.train.run_folder import open_run
from tests.support.configs import write_config, write_tokens

PNG = b"\x89PNG\r\n\x1a\n"
FIELDS = {
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_total", "step_seconds",
    "tokens_per_second", "mfu", "wire_bytes", "skipped_steps", "memory_bytes", "load_max_over_mean",
    "dead_experts", "expert_bias_range", "lb_loss", "router_z_loss",
}  # fmt: skip


def records(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records(run_dir)]


@pytest.fixture
def main(monkeypatch, capfd):
    """``main(args...)`` runs the command in this process: exit code and all that it printed."""

    def run(*args: object) -> tuple[int, str]:
        handler = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(sys, "argv", ["olmo-shard", *map(str, args)])
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main()
        finally:
            signal.signal(signal.SIGTERM, handler)
        out, err = capfd.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out + err

    return run


def start(*args: object, env: dict[str, str] | None = None, module: str = "olmo_shard"):
    command = [sys.executable, "-m", module, *map(str, args)]
    return subprocess.Popen(
        command,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output


def test_prepare_check_train_on_two_ranks_then_resume_twice(tmp_path, main):
    """The whole way of a newcomer, with W&B offline in three segments."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} of a small text about nothing much" for i in range(900)))
    data = tmp_path / "data"
    code, printed = main("prepare", text, "--train-bpe", "300", "--out", data)
    assert code == 0, printed
    assert "1 documents" in printed
    config = write_config(tmp_path)
    run = tmp_path / "run"
    overrides = [
        f"data.sources=[{{path: {data}}}]",
        f"data.validation={{text: {{path: {text}.bin, dtype: uint16}}}}",
        "model.vocab_size=300",
        "parallel.expert_parallel=2",
        "tracking.wandb=offline",
        "optim.lr=2e-2",
    ]
    (tmp_path / "text.txt.bin").write_bytes((data / "train.bin").read_bytes())
    code, printed = main("check", config, *overrides)
    assert code == 0, printed
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(printed)
    assert load_config(str(resolved)) == load_config(str(config), overrides)

    outputs = []
    for steps in (6, 10, 15):
        code, output = finish(
            start("train", config, *overrides, f"train.steps={steps}", "--nproc", "2")
        )
        assert code == 0, output
        outputs.append(output)
    assert "start     new run" in outputs[0]
    assert "dispatch collective (auto)" in outputs[0]
    assert f"resume    step 6 of 10, from {run}/checkpoints/step-00000006" in outputs[1]
    assert "validation text: loss" in outputs[2]
    summary = outputs[2].split("first loss")[1]
    assert re.search(rf"loss curve +{run}/loss\.png\n", summary)
    assert (run / "loss.png").read_bytes().startswith(PNG)

    found = records(run)
    assert [r["step"] for r in found] == list(range(1, 16))
    assert set(found[0]) >= FIELDS
    assert found[-1]["loss"] < found[0]["loss"]
    assert [r["tokens_total"] for r in found] == [256 * (i + 1) for i in range(15)]
    assert all(len(r["load_max_over_mean"]) == 1 for r in found)
    # Each rank sends half of the dense gradients and half of the dense weights, and rows besides.
    dense = 300 * 32 * 2 + 2 * (32 * 32 * 2 + 32 * 16 * 2) + 3 * 32 * 48 + 3 * 32 * 16
    assert all(dense * 4 < r["wire_bytes"] < 3 * dense * 4 for r in found)
    assert [r["step"] for r in records(run, "eval.jsonl")] == [3, 6, 9, 10, 12, 15]

    segments = sorted(str(path) for path in (run / "wandb").glob("offline-run-*"))
    assert len(segments) == 3, "one segment a start, from one rank"
    assert len({segment.rsplit("-", 1)[1] for segment in segments}) == 1, "one run id"
    assert f"wandb sync {' '.join(segments)}" in summary


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


@pytest.mark.parametrize("mode", ["mode=ddp", "fsdp.reshard=window"])
def test_evaluation_changes_nothing(tmp_path, main, mode):
    config = write_config(tmp_path)
    shared = [f"parallel.{mode}", "parallel.mode=" + ("ddp" if "ddp" in mode else "fsdp")]
    found = []
    for name, every in (("with", 1), ("without", 0)):
        run = tmp_path / name
        code, printed = main(
            "train", config, *shared, f"run.dir={run}", f"eval.every={every}", "checkpoint.every=0"
        )
        assert code == 0, printed
        assert not (run / "checkpoints").exists()
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


def test_torchrun_and_bare_variables_join_as_ranks(tmp_path):
    config = write_config(tmp_path)
    shared = ["parallel.expert_parallel=2", "train.steps=2", "eval.every=0", "checkpoint.every=0"]
    arguments = ["--standalone", "--nproc-per-node", "2", "-m", "olmo_shard", "train", config]
    code, output = finish(
        start(*arguments, *shared, f"run.dir={tmp_path / 'a'}", module="torch.distributed.run")
    )
    assert code == 0, output
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713"}
    processes = [
        start(
            "train", config, *shared, f"run.dir={tmp_path / 'b'}",
            env=address | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        code, output = finish(process)
        assert code == 0, output
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def children(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in path.read_text().split()]


def test_two_jobs_at_once_and_one_loses_a_rank(tmp_path):
    """Both take free ports; one loses a rank, ends in seconds and says why; the other goes on."""
    config = write_config(tmp_path)
    shared = ["parallel.expert_parallel=2", "eval.every=0", "checkpoint.every=0", "--nproc", "2"]
    job = start("train", config, *shared, f"run.dir={tmp_path / 'a'}", "train.steps=100000")
    other = start("train", config, *shared, f"run.dir={tmp_path / 'b'}", "train.steps=8")
    metrics = tmp_path / "a" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert time.monotonic() < deadline, "the job did not start"
        assert job.poll() is None, finish(job)
        time.sleep(0.1)
    victim = children(job.pid)[1]
    os.kill(victim, signal.SIGKILL)
    code, output = finish(job, seconds=20)
    assert code == 128 + signal.SIGKILL
    assert output.rstrip().endswith("olmo-shard: rank 1 of 2 failed first: killed by signal 9"), (
        output
    )
    code, output = finish(other)
    assert code == 0, output
    assert len(records(tmp_path / "b")) == 8


def test_a_rank_that_sleeps_is_named_after_the_timeout(tmp_path):
    config = write_config(tmp_path)
    shared = ["run.timeout_seconds=10", "eval.every=0", "checkpoint.every=0", "--nproc", "2"]
    job = start("train", config, *shared, "train.steps=100000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.1)
    os.kill(children(job.pid)[1], signal.SIGSTOP)
    code, output = finish(job, seconds=60)
    assert code == 1
    assert "rank 0 lost a peer, or waited longer than run.timeout_seconds = 10" in output
    assert output.rstrip().endswith("no answer from rank(s) [1], still running")
    assert "Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ending_the_launcher_ends_its_ranks(tmp_path, number):
    config = write_config(tmp_path)
    job = start("train", config, "train.steps=100000", "eval.every=0", "--nproc", "2")
    deadline = time.monotonic() + 60
    while len(children(job.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ranks = children(job.pid)
    time.sleep(1)
    job.send_signal(number)
    code, _ = finish(job, seconds=20)
    assert code == (128 + number if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline, "ranks are left behind"
        time.sleep(0.1)


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


def test_a_step_read_late_is_still_recorded(tmp_path, main, monkeypatch):
    """As on a GPU: figures are read after the next step is queued, and the last one at the end."""
    monkeypatch.setattr(trainer_module, "reads_late", lambda device: True)
    config = write_config(tmp_path)
    for name, steps in (("one", 1), ("five", 5)):
        run = tmp_path / name
        overrides = [f"run.dir={run}", f"train.steps={steps}", "eval.every=0", "checkpoint.every=0"]
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
