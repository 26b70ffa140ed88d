"""The run's folder: what is saved in it, its lock, and folders that cannot be used."""

import resource
import signal
from pathlib import Path

import pytest

from olmo_shard.errors import ConfigurationError
from olmo_shard.train.checkpoint_folder import complete_checkpoints
from olmo_shard.train.run_folder import open_run
from tests.support.commands import Main
from tests.support.configs import write_config


def test_the_default_saves_at_the_end_and_says_so(tmp_path: Path, main: Main) -> None:
    config = write_config(tmp_path)
    config.write_text(config.read_text().replace("checkpoint:\n  every: 3\n", ""))
    code, printed = main("train", config, "train.steps=2", "checkpoint.keep_last=1")
    assert code == 0, printed
    assert f"saves     at the end only, keeps the newest 1: {tmp_path}/run/checkpoints" in printed
    (saved,) = complete_checkpoints(tmp_path / "run")
    assert saved.name == "step-00000002"


def test_an_unfinished_save_is_named_at_the_start_and_removed_after_a_complete_one(
    tmp_path: Path, main: Main
) -> None:
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


def test_a_run_folder_is_for_one_job(tmp_path: Path, main: Main) -> None:
    write_config(tmp_path)
    with open_run(tmp_path / "run"):
        code, printed = main("train", tmp_path / "config.yaml")
    assert (code, "is in use by another job" in printed) == (2, True)
    assert main("train", tmp_path / "config.yaml")[0] == 0


def test_a_full_disk_is_an_error_before_training(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with (
            pytest.raises(
                ConfigurationError, match=r"run\.dir = .*/run cannot be written: File too"
            ),
            open_run(tmp_path / "run"),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("kind", ["file", "below a file", "bad record"])
def test_a_run_folder_that_cannot_be_used(tmp_path: Path, main: Main, kind: str) -> None:
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
