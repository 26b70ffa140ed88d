"""W&B's real client against local servers: answering, silent, gone."""

import io
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from olmo_shard.config import load_config
from olmo_shard.train.callbacks import RunInfo
from olmo_shard.train.callbacks.wandb import WandB
from olmo_shard.train.rewind import Rewound
from olmo_shard.train.state import TrainState
from olmo_shard.train.tracking import process
from tests.support.configs import write_config
from tests.support.wandb_segment import segment_rows, segment_steps
from tests.support.wandb_server import WandBServer, closed_port, silent_server, wandb_server

EXPERTS = {"step": 3, "first_step": 1, "layers": [1], "counts": [[1, 3]]}


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path) -> None:
    for name in os.environ:
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def server(monkeypatch) -> Iterator[WandBServer]:
    """A server that answers, whose address and key are in W&B's variables."""
    with wandb_server() as running:
        use(monkeypatch, running.url)
        yield running


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)


class Job:
    """The starts of one run: what its state and the console hold."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.config = load_config(str(write_config(folder)), ["tracking.wandb=auto", *overrides])
        self.run_dir, self.state = folder / "run", TrainState()
        self.buffer = io.StringIO()

    def start(self, last_step: int = 0) -> WandB:
        """A start at the state's step.

        :param last_step: last step that earlier starts have recorded; 0 for a new run.
        """
        tracker = WandB(RichConsole(file=self.buffer, width=400))
        info = RunInfo(
            config=self.config,
            run_dir=self.run_dir,
            total_steps=9,
            state=self.state,
            notes=[],
            ranks=2,
            checkpoint=Path("a checkpoint") if last_step else None,
            rewound=Rewound(last_step=last_step),
        )
        tracker.on_start(info)
        return tracker

    def steps(self, tracker: WandB, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.state.step, self.state.tokens = step, 10 * step
            record: dict[str, Any] = {"step": step, "loss": 1 / step, "tokens_total": 10 * step}
            tracker.on_step(record)

    @property
    def printed(self) -> str:
        return self.buffer.getvalue()


def sync(lines: list[tuple[str, str]], server: WandBServer, cwd: Path) -> None:
    """Run the command that the summary prints; it leaves a log where it runs."""
    arguments = shlex.split(dict(lines)["to upload it"])
    command = [str(Path(sys.executable).with_name(arguments[0])), *arguments[1:]]
    environ = os.environ | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "x" * 40}
    done = subprocess.run(
        command, env=environ, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_auto_is_online_and_a_resume_repeats_no_step(tmp_path, server):
    job = Job(tmp_path)
    tracker = job.start()
    job.steps(tracker, 1, 3)
    tracker.on_eval(3, {"held_out": 0.0})
    tracker.on_experts(EXPERTS)
    tracker.on_note("a note")
    run_id = job.state.tracker_run_id
    url = f"{server.url}/entity/project/runs/{run_id}"
    assert tracker.on_end() == [("W&B run", url)]
    assert f"W&B       online: {url}\n" in job.printed
    assert server.steps == [1, 2, 3]
    last = server.rows[-1]
    assert (last["loss"], last["eval/held_out"], last["tokens_total"]) == (1 / 3, 0.0, 30)
    assert last["eval_perplexity/held_out"] == 1.0
    assert last["experts/load"]["_type"] == "image-file"
    assert any(name.endswith(".png") for name in server.files)
    assert server.alerts == ["a note"]

    job.state.step = 2
    tracker = job.start(last_step=3)
    job.steps(tracker, 3, 5)
    tracker.on_end()
    assert server.steps == [1, 2, 3, 4, 5], "step 3 stands once"
    mark = {name: value for name, value in server.rows[3].items() if name.startswith("resume/")}
    assert mark == {
        "resume/step": 2, "resume/mode": "ddp", "resume/ranks": 2, "resume/expert_parallel": 1,
        "resume/compute_dtype": "float32",
    }  # fmt: skip
    assert not job.state.tracker_segments
    assert "W&B       has the steps before 4 already" in job.printed


@pytest.mark.parametrize("place", [".netrc", ".config/wandb/settings"])
def test_the_clients_files_hold_key_and_server(tmp_path, monkeypatch, place):
    """A key without a variable; W&B's client writes both files by itself."""
    with wandb_server() as server:
        host, key = server.url.removeprefix("http://"), "x" * 40
        settings = f"[default]\nbase_url = {server.url}\napi_key = {key}\n"
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if place == ".netrc":
            monkeypatch.setenv("WANDB_BASE_URL", server.url)
            settings = f"machine {host}\n  login user\n  password {key}\n"
        path.write_text(settings)
        job = Job(tmp_path)
        tracker = job.start()
        job.steps(tracker, 1, 2)
        tracker.on_end()
        assert server.steps == [1, 2]


def test_offline_segments_go_on_in_steps_and_are_uploaded_as_one_run(tmp_path):
    job = Job(tmp_path)
    lines: list[tuple[str, str]] = []
    for first, last in ((1, 4), (3, 6), (7, 8)):
        job.state.step = first - 1
        tracker = job.start(last_step=max(job.state.step, 4 if first == 3 else 0))
        job.steps(tracker, first, last)
        lines = tracker.on_end()
    found = job.state.tracker_segments
    assert [segment_steps(folder) for folder in found] == [[1, 2, 3, 4], [5, 6], [7, 8]]
    assert segment_rows(found[1])[0]["resume/step"] == 2
    assert "W&B       offline: " in job.printed
    assert "(no API key for " in job.printed
    assert lines[0] == ("W&B offline run", found[-1])
    assert lines[1] == ("to upload it", shlex.join(["wandb", "sync", *found]))
    with wandb_server() as server:
        sync(lines, server, tmp_path)
        assert server.steps == list(range(1, 9)), "no segment replaces another"


@pytest.mark.parametrize("kind", ["silent", "closed"])
def test_a_server_that_never_answers_gives_an_offline_segment(tmp_path, monkeypatch, kind):
    """With WANDB_MODE=online, which asks no probe."""
    job = Job(tmp_path, "tracking.init_seconds=3")
    with silent_server() if kind == "silent" else closed_port() as url:
        use(monkeypatch, url)
        monkeypatch.setenv("WANDB_MODE", "online")
        tracker = job.start()
        job.steps(tracker, 1, 3)
        lines = tracker.on_end()
    (segment,) = job.state.tracker_segments
    assert segment_steps(segment) == [1, 2, 3]
    reason = f"no answer from {url} within 3 s"
    assert job.printed == f"W&B       offline: {segment} ({reason})\n"
    assert [name for name, _ in lines] == ["W&B offline run", "to upload it"]


@pytest.mark.parametrize("note", [False, True])
def test_a_server_that_falls_silent_stops_nothing_and_loses_nothing(tmp_path, server, note):
    """An alert holds up the client until it is killed; its last 15 s may not be on disk then."""
    job = Job(tmp_path, "tracking.finish_seconds=8")
    tracker = job.start()
    job.steps(tracker, 1, 2)
    wait_until_opened(tracker)
    server.silent.set()
    job.steps(tracker, 3, 200)
    if note:
        tracker.on_note("a note")
    lines = tracker.on_end()
    assert ("not uploaded", "W&B did not finish within 8 s") in lines
    assert "--include-online" in dict(lines)["to upload it"]
    assert tracker._process is not None
    assert not tracker._process.running
    with wandb_server() as later:
        sync(lines, later, tmp_path)
        assert later.steps[:2] == [1, 2]
        if not note:
            assert later.steps == list(range(1, 201))


def test_a_killed_run_leaves_a_segment_that_is_whole(tmp_path):
    """The tracker process outlives the run's process only to finish."""
    code = (
        "import os, signal, sys, pathlib; from tests.train.test_wandb import *;"
        "job = Job(pathlib.Path(sys.argv[1])); tracker = job.start(); job.steps(tracker, 1, 50);"
        "wait_until_opened(tracker); tracker._process.leave();"
        "print(tracker._process._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    wait_until_gone(int(done.stdout))
    (segment,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert segment_steps(segment) == list(range(1, 51))


@pytest.mark.parametrize("broken", ["setup", "init", "log", "finish"])
def test_an_error_of_the_client_is_reported_once_and_ends_nothing(tmp_path, monkeypatch, broken):
    (tmp_path / "wandb.py").write_text(BROKEN_CLIENT.format(broken=broken))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    job = Job(tmp_path)
    tracker = job.start()
    job.steps(tracker, 1, 3)
    tracker.on_end()
    error = "OSError: no space left"
    if broken == "setup":  # only the choice of a mode needs it
        assert f"offline: /x ({error})" in job.printed
    else:
        assert job.printed.count("W&B stopped: ") == 1
        assert f"W&B stopped: {error}; the run goes on" in job.printed


BROKEN_CLIENT = """
from types import SimpleNamespace


def make(name, result=None):
    def call(*args, **kwargs):
        if name == "{broken}":
            raise OSError("no space left")
        return result

    return call


settings = SimpleNamespace(
    mode="online", base_url="http://nowhere.test", api_key=None, identity_token_file=None
)
run = SimpleNamespace(
    offline=True, dir="/x/files", url=None, starting_step=0, log=make("log"), finish=make("finish")
)
setup, init, Settings = make("setup", SimpleNamespace(settings=settings)), make("init", run), dict
"""


def test_a_client_that_takes_no_message_ends_tracking(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(process, "_MOST_MESSAGES", 3)
    job = Job(tmp_path)
    tracker = job.start()
    job.steps(tracker, 1, 9)
    assert tracker.on_end() == []
    assert job.printed.count("W&B stopped: 3 messages wait for W&B's client") == 1


def test_a_disabled_tracker_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    job = Job(tmp_path)
    tracker = job.start()
    job.steps(tracker, 1, 3)
    assert tracker.on_end() == []
    assert job.printed == ""
    assert not list((tmp_path / "run" / "wandb").glob("*run-*"))


def wait_until_opened(tracker: WandB) -> None:
    while tracker._opened is None:
        tracker._tell_news()
        time.sleep(0.05)


def wait_until_gone(pid: int) -> None:
    """A process that has ended may stay as a zombie where no parent collects it."""
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)
