"""The run's folder: its lock, and the choice of the checkpoint that the run resumes from."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from olmo_shard.config import CheckpointConfig, ModelConfig
from olmo_shard.data.coverage import describe_end
from olmo_shard.data.loader import DataLoader
from olmo_shard.errors import CheckpointError, ConfigurationError
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
"""File in the run's folder that the running job holds a lock on."""


def check_writable(run_dir: Path) -> None:
    """Check that a folder exists and is writable, or can be created. Changes nothing.

    :raises ConfigurationError: if it cannot be created or written.
    """
    problem = _unwritable(run_dir)
    if problem:
        raise ConfigurationError(f"run.dir = {run_dir} cannot be written: {problem}")


def choose_checkpoint(run_dir: Path, resume: str, model: ModelConfig) -> Path | None:
    """Return the checkpoint to resume from; ``None`` for a new run.

    :param resume: ``checkpoint.resume``: ``auto``, ``never``, or the path of a checkpoint.
    :param model: model of the run, which the checkpoint must fit.
    :raises CheckpointError: if the checkpoint is missing or of another model; if ``never`` is given
        and the folder has checkpoints; or if the folder has later checkpoints than the given one,
        because a resume with ``auto`` would take those for the newest of this run.
    """
    complete = complete_checkpoints(run_dir)
    # A new run in a folder with checkpoints would mix the checkpoints of two runs.
    if resume == "never":
        if complete:
            raise CheckpointError(
                f"checkpoint.resume = never, but run.dir = {run_dir} holds {complete[-1].name}: "
                "choose another run.dir, remove the old run, or use checkpoint.resume=auto"
            )
        return None
    if resume == "auto" and not complete:
        return None
    # The checkpoint must be whole and of this model, before all ranks load it.
    path = complete[-1] if resume == "auto" else Path(resume)
    state = read_state(path)
    check_same_model(path, state.model, model)
    if complete and read_state(complete[-1]).train.step > state.train.step:
        raise CheckpointError(
            f"checkpoint.resume = {path} is at step {state.train.step}, but run.dir = {run_dir} "
            f"holds the later {complete[-1].name}: choose another run.dir, or remove the later ones"
        )
    return path


def nothing_left(path: Path, step: int, loader: DataLoader) -> str | None:
    """Describe why a checkpoint is at the run's end; ``None`` if a step is left to train.

    :param path: checkpoint that the run resumes from.
    :param step: steps done at the checkpoint.
    :param loader: a loader at the checkpoint's position.
    """
    if step < loader.total_steps(step):
        return None
    return (
        f"nothing to train: {path} is at step {step} of {describe_end(loader, step)}; raise "
        "train.steps (or tokens, epochs), choose another run.dir, or name another "
        "checkpoint.resume"
    )


def describe_saves(run_dir: Path, saves: CheckpointConfig) -> list[str]:
    """Return log lines: which checkpoints the run will save, and which saves are incomplete."""
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
def open_run(run_dir: Path) -> Iterator[None]:
    """Create the run's folder and hold its lock.

    :raises ConfigurationError: if the folder cannot be written, another job holds its lock, or a
        record in it is damaged.
    """
    # A damaged record is an error now, not at the end of the run when it is read for the summary.
    for name in (METRICS_FILE, EVAL_FILE, EXPERTS_FILE, EVENTS_FILE):
        read_records(run_dir / name)
    with ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((run_dir / _LOCK).open("wb", buffering=0))
            # The kernel releases the lock when the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file is unbuffered, so that a full disk is an error now, not at the first record.
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
    """Why a folder cannot be created or written at ``path``; ``None`` if it can."""
    # The first existing folder upwards is where folders would be created.
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is not a folder"
    permitted = os.access(existing, os.W_OK | os.X_OK)
    return None if permitted else f"no permission to write in {existing}"
