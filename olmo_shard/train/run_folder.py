"""A run's folder: who may use it, and where in it to go on."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from olmo_shard.config import Config
from olmo_shard.data.coverage import describe_end
from olmo_shard.data.loader import DataLoader
from olmo_shard.errors import CheckpointError, ConfigurationError, NothingLeftError
from olmo_shard.train.checkpoint_fit import check_same_model, first_few
from olmo_shard.train.checkpoint_folder import complete_checkpoints, leftovers, read_state
from olmo_shard.train.records import (
    EVAL_FILE,
    EVENTS_FILE,
    EXPERTS_FILE,
    METRICS_FILE,
    read_records,
)

_LOCK = ".lock"


def check_writable(config: Config) -> None:
    """:raises ConfigurationError: where run.dir cannot be a folder to write in. Changes nothing."""
    problem = _unwritable(Path(config.run.dir))
    if problem:
        raise ConfigurationError(f"run.dir = {config.run.dir} cannot be written: {problem}")


def choose_checkpoint(config: Config) -> Path | None:
    """The checkpoint to resume from, by ``checkpoint.resume``.

    :raises CheckpointError: where a named one is missing or of another model, where ``never`` meets
        a run that has some, or where the run has later ones, which would be taken for its
        continuation.
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
    state = read_state(path)
    check_same_model(path, state.model, config.model)
    if complete and read_state(complete[-1]).train.step > state.train.step:
        raise CheckpointError(
            f"checkpoint.resume = {path} is at step {state.train.step}, but run.dir = {run_dir} "
            f"holds the later {complete[-1].name}: choose another run.dir, or remove the later ones"
        )
    return path


def check_something_left(path: Path, step: int, loader: DataLoader) -> None:
    """Check that the run has a step left.

    :param path: checkpoint that the run resumes from.
    :param step: steps done at the checkpoint.
    :param loader: the loader at the checkpoint's position.
    :raises NothingLeftError: where the checkpoint is at the run's end already.
    """
    if step >= loader.total_steps(step):
        raise NothingLeftError(
            f"nothing to train: {path} is at step {step} of {describe_end(loader, step)}; raise "
            "train.steps (or tokens, epochs), choose another run.dir, or name another "
            "checkpoint.resume"
        )


def describe_saves(config: Config) -> list[str]:
    """Lines for the log: which checkpoints the run will save, and which saves did not end."""
    run_dir, saves = Path(config.run.dir), config.checkpoint
    if saves.every is None:
        lines = ["saves     nothing, not even at the end (checkpoint.every = null)"]
    else:
        when = f"every {saves.every} steps and at the end" if saves.every else "at the end only"
        kept = f"keeps the newest {saves.keep_last}" if saves.keep_last else "keeps all"
        lines = [f"saves     {when}, {kept}: {run_dir}/checkpoints"]
    unfinished = [path.name for path in leftovers(run_dir)]
    if unfinished:
        then = "they stay" if saves.every is None else "the next complete save removes them"
        lines.append(f"leftover  saves that did not end: {first_few(unfinished)}; {then}")
    return lines


@contextmanager
def open_run(config: Config) -> Iterator[None]:
    """Make the folder and hold its lock.

    :raises ConfigurationError: where it cannot be written, or another job is using it.
    """
    run_dir = Path(config.run.dir)
    for name in (METRICS_FILE, EVAL_FILE, EXPERTS_FILE, EVENTS_FILE):
        read_records(run_dir / name)
    with ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((run_dir / _LOCK).open("wb", buffering=0))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Unbuffered: a full disk is an error here, and not in the first record.
            lock.write(b"%d\n" % os.getpid())
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
