"""Jobs of several processes, to their end or to a kill."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.commands import children, finish, losses, records, start
from tests.support.configs import write_config
from tests.support.wandb_segment import segment_steps
from tests.support.wandb_server import silent_server


def test_a_tracker_that_never_answers_stops_no_job(tmp_path: Path) -> None:
    """The ranks have a shorter timeout than the tracker, and rank 1 does not wait for it."""
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


def test_torchrun_and_bare_variables_join_as_ranks(tmp_path: Path) -> None:
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


def test_ranks_with_another_layout_end_at_once_with_the_field(tmp_path: Path) -> None:
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


def test_two_jobs_at_once_and_one_loses_a_rank(tmp_path: Path) -> None:
    """Both choose free ports. The one that loses a rank ends in seconds with the cause."""
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
    tmp_path: Path,
    module: str,
    owner: str,
    function: str,
    layout: list[str],
    action: str,
    cause: str,
    expected: int,
) -> None:
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
def test_a_rank_that_leaves_with_exit_code_0_is_named(tmp_path: Path) -> None:
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
def test_a_rank_that_sleeps_is_named_after_the_timeout(tmp_path: Path) -> None:
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
def test_ending_the_launcher_ends_its_ranks(tmp_path: Path, number: int) -> None:
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
