"""scripts/slurm.sbatch on a fake cluster, scripts/torchrun.sh with a fake torchrun."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import records
from tests.support.configs import write_config
from tests.support.slurm import cluster

SCRIPTS = Path(__file__).parents[1] / "scripts"
SCRIPT = SCRIPTS / "slurm.sbatch"


class Submit:
    """Submit the script to the fake cluster, from a folder with a space in its name.

    :param folder: an empty folder for the project and the fake programs.
    """

    def __init__(self, folder: Path) -> None:
        self.programs, self.root = folder / "bin", folder / "my project"
        self.programs.mkdir()
        make_program(self.root, "olmo-shard", f'exec {sys.executable} -m olmo_shard "$@"')

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """Submit with arguments. Returns the exit code of the job, and its output."""
        # A shell that has used torchrun may still export these variables.
        left_over = {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "7", "MASTER_PORT": "1"}
        done = subprocess.run(
            ["sbatch", str(SCRIPT), *arguments],
            cwd=self.root,
            env=cluster(self.programs) | left_over,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        return done.returncode, done.stdout


def make_program(root: Path, name: str, body: str) -> None:
    """Create a shell script in the virtual environment of a project."""
    program = root / ".venv" / "bin" / name
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """A project on the fake cluster."""
    return Submit(tmp_path)


def test_a_submitted_config_trains_on_all_tasks(submit: Submit) -> None:
    write_config(submit.root)
    code, output = submit("config.yaml", "train.steps=2", "eval.every=2", "run.dir=runs/two")
    logs = sorted(submit.root.glob("slurm-*/*"))
    assert code == 0, output + "".join(log.read_text() for log in logs)
    assert [log.name for log in logs] == ["rank-0.log", "rank-1.log"]
    assert "rank 0 on localhost" in output
    run = submit.root / "runs" / "two"  # relative to where the job was submitted
    assert [record["step"] for record in records(run)][-1] == 2
    started = json.loads((submit.programs / "srun.json").read_text())
    options, environ = started["options"], started["environ"]
    assert options["--kill-on-bad-exit"] == "1"
    assert options["--cpus-per-task"] == environ["SLURM_CPUS_PER_TASK"]
    assert Path(started["command"][0]).is_absolute()
    assert environ["MASTER_ADDR"] == "localhost"
    # olmo-shard derives the port from the job, so that two jobs on a host use different ports.
    assert "MASTER_PORT" not in environ
    assert "RANK" not in environ


def test_an_error_of_a_task_ends_the_job(submit: Submit) -> None:
    write_config(submit.root)
    code, _ = submit("config.yaml", "train.stepz=2")
    assert code == 2
    logs = list(submit.root.glob("slurm-*/rank-*.log"))
    assert len(logs) == 2
    assert all("train.stepz" in log.read_text() for log in logs)


def test_missing_files_are_named_before_any_task_starts(submit: Submit) -> None:
    write_config(submit.root)
    assert submit() == (
        2,
        "slurm.sbatch: no config: sbatch scripts/slurm.sbatch configs/olmoe-1b-7b.yaml\n",
    )
    code, output = submit("other.yaml")
    assert (code, output) == (2, f"slurm.sbatch: {submit.root} has no config other.yaml\n")
    shutil.rmtree(submit.root / ".venv")
    code, output = submit("config.yaml")
    assert code == 2
    assert f"no {submit.root}/.venv/bin/olmo-shard: make .venv/installed" in output
    assert not (submit.programs / "srun.json").exists()
    done = subprocess.run(
        ["bash", SCRIPT, "config.yaml"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "slurm.sbatch: this is no SLURM job: submit it with sbatch\n",
    )


def test_torchrun_is_found_from_any_folder(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "my project", tmp_path / "elsewhere"
    make_program(root, "torchrun", 'echo "$@"')
    (root / "scripts").mkdir()
    elsewhere.mkdir()
    script = shutil.copy(SCRIPTS / "torchrun.sh", root / "scripts")

    def run(**environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", script, "a b.yaml"],
            cwd=elsewhere,
            env={"PATH": "/usr/bin:/bin", **environ},
            capture_output=True,
            text=True,
            check=False,
        )

    assert "HEAD: set it to the name of the first host" in run().stderr
    assert "NODES: set it to the number of hosts" in run(HEAD="one").stderr
    done = run(HEAD="one", NODES="2", PORT="31000")
    assert done.returncode == 0, done.stderr
    assert "--nnodes 2 --nproc-per-node 8" in done.stdout
    assert "--rdzv-endpoint one:31000 -m olmo_shard train a b.yaml" in done.stdout
