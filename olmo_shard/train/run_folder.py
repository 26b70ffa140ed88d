"""A run's folder: who may use it, and where in it to go on."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from olmo_shard.config import Config, dump_yaml
from olmo_shard.errors import CheckpointError, ConfigurationError
from olmo_shard.train.callbacks.jsonl import EVAL_FILE, FILE, read_records
from olmo_shard.train.checkpoint_folder import complete_checkpoints, read_state

_LOCK = ".lock"


def check_writable(config: Config) -> None:
    """:raises ConfigurationError: where run.dir cannot be a folder to write in. Changes nothing."""
    problem = _unwritable(Path(config.run.dir))
    if problem:
        raise ConfigurationError(f"run.dir = {config.run.dir} cannot be written: {problem}")


def choose_checkpoint(config: Config, total_steps: int) -> Path | None:
    """The checkpoint to resume from, by ``checkpoint.resume``.

    :raises CheckpointError: where a named one is missing, where ``never`` meets a run that has
        some, or where the run has later ones, which would be taken for its continuation.
    :raises ConfigurationError: where nothing is left to train.
    """
    run_dir, resume = Path(config.run.dir), config.checkpoint.resume
    complete = complete_checkpoints(run_dir)
    if resume == "never":
        if complete:
            raise CheckpointError(
                f"checkpoint.resume = never, but run.dir = {run_dir} holds {complete[-1].name}: "
                "choose another run.dir, remove the old run, or use checkpoint.resume=auto"
            )
        return None
    if resume == "auto" and not complete:
        return None
    path = complete[-1] if resume == "auto" else Path(resume)
    step = read_state(path).train.step
    if complete and read_state(complete[-1]).train.step > step:
        raise CheckpointError(
            f"checkpoint.resume = {path} is at step {step}, but run.dir = {run_dir} holds the "
            f"later {complete[-1].name}: choose another run.dir, or remove the later checkpoints"
        )
    if step >= total_steps:
        raise ConfigurationError(
            f"nothing to train: {path} is at step {step} of {total_steps}; raise train.steps "
            "(or tokens, epochs), choose another run.dir, or name another checkpoint.resume"
        )
    return path


@contextmanager
def open_run(config: Config) -> Iterator[None]:
    """Make the folder, hold its lock, write the resolved config.

    :raises ConfigurationError: where it cannot be written, or another job is using it.
    """
    run_dir = Path(config.run.dir)
    for name in (FILE, EVAL_FILE):
        read_records(run_dir / name)
    with ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((run_dir / _LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (run_dir / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        except BlockingIOError as error:
            raise ConfigurationError(
                f"run.dir = {run_dir} is in use by another job: choose another run.dir, or end "
                "that job"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"run.dir = {run_dir} cannot be written: {error.strerror}"
            ) from error
        yield


def _unwritable(path: Path) -> str | None:
    """Why a folder cannot be made or written at ``path``, if so; changes nothing."""
    above = path.absolute()
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        return f"{above} is not a folder"
    return None if os.access(above, os.W_OK | os.X_OK) else f"no permission to write in {above}"
