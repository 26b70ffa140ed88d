"""Stack dumps and logs of ranks, by jobs of several processes."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.commands import children, finish, start
from tests.support.configs import write_config


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing happened within 60 s"
        time.sleep(0.1)


def has_steps(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") > 2


def test_sigusr2_dumps_the_stacks_of_a_rank_that_is_stuck(tmp_path: Path) -> None:
    """The launcher forwards the signal; the ranks go on, and the second dump is appended."""
    config, run = write_config(tmp_path), tmp_path / "run"
    job = start(
        "train", config, "train.steps=100000", "eval.every=0", "checkpoint.every=null",
        "--nproc", "2",
    )  # fmt: skip
    wait_until(lambda: has_steps(run))
    stacks = [run / "stacks" / f"rank-{rank}.txt" for rank in range(2)]
    pids = children(job.pid)
    headers = [path.read_text() for path in stacks]
    for rank, header in enumerate(headers):
        pattern = rf"[\d-]+ [\d:]+ rank {rank} of 2, process {pids[rank]} on \S+, cpu\n"
        assert re.fullmatch(pattern, header), header
    assert (run / "logs" / "rank-1.log").read_text() == headers[1]
    assert not (run / "logs" / "rank-0.log").exists()

    job.send_signal(signal.SIGUSR2)
    for path in stacks:
        wait_until(lambda path=path: "in fit" in path.read_text())
    # A stopped rank leaves its peer in a collective, in compiled code.
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(1)
    before = stacks[0].read_text()
    os.kill(pids[0], signal.SIGUSR2)
    wait_until(lambda: stacks[0].read_text().count("in fit") == before.count("in fit") + 1)
    newest = stacks[0].read_text().removeprefix(before)
    assert re.search(r"(work|shared_memory|collectives)\.py", newest), newest
    os.kill(pids[1], signal.SIGCONT)
    job.send_signal(signal.SIGTERM)
    code, output = finish(job, seconds=60)
    assert code == 128 + signal.SIGTERM, output


def test_the_log_of_a_rank_ends_with_its_error(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    code = """
import os
if os.environ.get("RANK") == "1":
    from olmo_shard.train.trainer import Trainer
    original = Trainer._step
    def step(self):
        print("rank", self.mesh.rank, "runs a step")
        if self.state.step == 2:
            raise RuntimeError("out of luck")
        original(self)
    Trainer._step = step
"""
    (tmp_path / "sitecustomize.py").write_text(code)
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    job = start("train", config, "eval.every=0", "--nproc", "2", env={"PYTHONPATH": paths})
    code, output = finish(job, seconds=60)
    assert code == 1
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert log.count("rank 1 runs a step\n") == 3
    assert log.rstrip().endswith("RuntimeError: out of luck")
    assert "runs a step" not in output, "standard output of ranks above 0 goes to their logs"
    assert "rank 1 of 2 failed first: RuntimeError: out of luck" in output


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    run.mkdir()
    (run / "stacks").write_text("a file, not a folder")
    code, output = finish(start("train", config))
    assert code == 2
    assert f"run.dir: {run}/stacks/rank-0.txt cannot be written: File exists" in output
