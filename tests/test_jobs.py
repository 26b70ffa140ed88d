"""Jobs of several processes, to their end or to a kill; few, since slow."""

import math
import os
import re
import signal
import time
from pathlib import Path

import pytest

from olmo_shard.config import load_config
from tests.support.commands import children, finish, losses, records, start
from tests.support.configs import write_config
from tests.support.wandb_segment import segment_steps
from tests.support.wandb_server import silent_server

PNG = b"\x89PNG\r\n\x1a\n"


FIELDS = {
    "step", "loss", "perplexity", "grad_norm", "lr", "tokens", "tokens_total", "step_seconds",
    "tokens_per_second", "mfu", "wire_bytes", "exposed_seconds", "skipped_steps", "memory_bytes",
    "load_max_over_mean",
    "dead_experts", "expert_bias_range", "lb_loss", "router_z_loss",
}  # fmt: skip


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
    assert (
        "dispatch  rowwise (parallel.dispatch = auto): "
        "mailboxes of 2 slots x 1 peer(s) x 32 rows x 144 B = 9,344 bytes (9.1 KiB) a rank; "
    ) in outputs[0]
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
    assert "gather" not in found[0]["exposed_seconds_by_kind"], "nothing was left by a step before"
    assert "gather" in found[1]["exposed_seconds_by_kind"]
    for record in found:
        by_kind = record["wire_bytes_by_kind"]
        assert by_kind["reduce"] == pytest.approx(dense * 4 / 2, rel=0.02)
        assert by_kind["gather"] == pytest.approx(dense * 4 / 2, rel=0.02)
        assert record["wire_bytes"] == sum(by_kind.values())
        assert by_kind.keys() == {"tokens", "control", "reduce", "gather", "rows", "metadata"}
        seconds = record["exposed_seconds_by_kind"]
        assert seconds.keys() <= by_kind.keys()
        assert 0 < record["exposed_seconds"] == sum(seconds.values()) < record["step_seconds"]
        assert record["row_bytes"] == [by_kind["rows"] + by_kind["metadata"]]
        assert 0 < record["rows_sent"][0] <= 256, "a token at most once to the other rank"
        assert record["received_rows_mean"][0] <= record["received_rows_max"][0] <= 256
        assert 256 <= 2 * record["received_rows_mean"][0] <= 512, "each token on one rank or both"
        assert record["dropped_routes"] == [0]
        assert record["waited_seconds"][0] <= record["waited_seconds_max"] < record["step_seconds"]
        assert record["waited_least_rank"] in (0, 1)
    evals = records(run, "eval.jsonl")
    assert [r["step"] for r in evals] == [3, 6, 9, 10, 12, 15]
    assert [r["tokens_total"] for r in evals] == [256 * r["step"] for r in evals]
    assert found[-1]["perplexity"] == pytest.approx(math.exp(found[-1]["loss"]))
    experts = records(run, "experts.jsonl")
    assert [(r["first_step"], r["step"]) for r in experts] == [(1, 6), (7, 10), (11, 15)]
    for line in experts:
        (counts,) = line["counts"]
        routes = 2 * 256 * (line["step"] - line["first_step"] + 1)
        assert (line["layers"], len(counts), sum(counts)) == ([1], 4, routes), "top-2 of 4"
    assert (run / "experts.png").read_bytes().startswith(PNG)
    resumes = [r for r in records(run, "events.jsonl") if r["event"] == "resume"]
    assert [(r["step"], r["ranks"], r["expert_parallel"]) for r in resumes] == [
        (6, 2, 2),
        (10, 2, 2),
    ]
    assert resumes[1]["reason"] == "the start before reached its end, step 10"
    assert resumes[1]["checkpoint"].endswith("step-00000010")

    segments = sorted(str(path) for path in (run / "wandb").glob("offline-run-*"))
    assert len(segments) == 3, "one segment a start, from one rank"
    assert len({segment.rsplit("-", 1)[1] for segment in segments}) == 1, "one run id"
    assert f"wandb sync {' '.join(segments)}" in summary
    steps = [step for segment in segments for step in segment_steps(segment)]
    assert steps == list(range(1, 16)), "one axis over all segments"


def test_a_tracker_that_never_answers_stops_no_job(tmp_path):
    """Two ranks whose timeout is shorter than the tracker's own; the other rank waits for none."""
    config = write_config(tmp_path)
    with silent_server() as url:
        job = start(
            "train", config, "tracking.wandb=auto", "tracking.init_seconds=2",
            "run.timeout_seconds=60", "eval.every=0", "checkpoint.every=null", "--nproc", "2",
            env={
                "WANDB_MODE": "online", "WANDB_API_KEY": "x" * 40, "WANDB_BASE_URL": url,
                "HOME": str(tmp_path),
            },
        )  # fmt: skip
        code, output = finish(job)
    assert code == 0, output
    (segment,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert segment_steps(segment) == [r["step"] for r in records(tmp_path / "run")]
    line = f"W&B       offline: {segment} (no answer from {url} within 2 s)"
    assert output.count(line) == 1, output


def test_torchrun_and_bare_variables_join_as_ranks(tmp_path):
    config = write_config(tmp_path)
    shared = [
        "parallel.expert_parallel=2",
        "train.steps=2",
        "eval.every=0",
        "checkpoint.every=null",
    ]
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


def test_ranks_with_another_layout_end_at_once_with_the_field(tmp_path):
    """Without a launcher: each rank ends by itself, long before the timeout of 600 s."""
    config = write_config(tmp_path)
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29714"}
    processes = [
        start(
            "train", config, f"parallel.expert_parallel={4 - 3 * rank}",
            env=address | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        code, output = finish(process, seconds=60)
        assert code == 2
        assert (
            "olmo-shard: the ranks have different configs: parallel.expert_parallel = 4 on rank 0, "
            "1 on rank 1; start every rank with the same configs"
        ) in output
    assert not (tmp_path / "run").exists()


def test_two_jobs_at_once_and_one_loses_a_rank(tmp_path):
    """Both take free ports; one loses a rank, ends in seconds and says why; the other goes on."""
    config = write_config(tmp_path)
    shared = ["parallel.expert_parallel=2", "eval.every=0", "checkpoint.every=null", "--nproc", "2"]
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


SABOTAGE = """
import os, signal
if os.environ.get("RANK") == "1":
    from {module} import {owner}

    original, calls = {owner}.{function}, 0

    def start(*args, **kwargs):
        global calls
        calls += 1
        work = original(*args, **kwargs)
        if calls == {call}:
            {action}
        return work

    {owner}.{function} = start
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "owner", "function", "layout"),
    [
        ("olmo_shard.parallel", "reduce", "reduce_scatter_start", []),
        ("olmo_shard.parallel", "gather", "all_gather_start", []),
        (
            "olmo_shard.dispatch.heap.shared_memory", "SharedMemoryHeap", "release",
            ["parallel.expert_parallel=3", "model.moe.num_experts=6"],
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("action", "cause", "expected"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9", 128 + signal.SIGKILL),
        ("raise RuntimeError('out of luck')", "RuntimeError: out of luck", 1),
    ],
)
def test_a_rank_lost_in_the_middle_of_an_overlap_ends_all(
    tmp_path, module, owner, function, layout, action, cause, expected
):
    """Rank 1 of 3 starts a bucket of the second step, or an exchange, and never waits for it."""
    config = write_config(tmp_path)
    code = SABOTAGE.format(module=module, owner=owner, function=function, action=action, call=12)
    (tmp_path / "sitecustomize.py").write_text(code)
    job = start(
        "train", config, "parallel.ddp.bucket_cap_mb=0.01", "train.global_batch_tokens=96", *layout,
        "train.steps=1000", "eval.every=0", "checkpoint.every=null", "--nproc", "3",
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    code, output = finish(job, seconds=60)
    assert code == expected, output
    assert output.rstrip().endswith(f"olmo-shard: rank 1 of 3 failed first: {cause}"), output
    assert len(records(tmp_path / "run")) <= 2


@pytest.mark.slow
def test_a_rank_that_leaves_with_exit_code_0_is_named(tmp_path):
    config = write_config(tmp_path)
    place = {"module": "olmo_shard.parallel", "owner": "reduce", "function": "reduce_scatter_start"}
    code = SABOTAGE.format(**place, action="os._exit(0)", call=3)
    (tmp_path / "sitecustomize.py").write_text(code)
    job = start(
        "train", config, "train.steps=1000", "--nproc", "2", env={"PYTHONPATH": str(tmp_path)}
    )
    code, output = finish(job, seconds=60)
    assert code == 1, output
    message = (
        "rank 1 of 2 failed first: left in the middle of the run with exit code 0; rank 0 says"
    )
    assert message in output.splitlines()[-1]


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_after_the_timeout(tmp_path):
    config = write_config(tmp_path)
    shared = ["run.timeout_seconds=10", "eval.every=0", "checkpoint.every=null", "--nproc", "2"]
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
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    job = start(
        "train", config, "train.steps=100000", "eval.every=0", "--nproc", "2",
        env={"TMPDIR": str(temporary)},
    )  # fmt: skip
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
    assert not list(temporary.glob("olmo_shard-*"))
