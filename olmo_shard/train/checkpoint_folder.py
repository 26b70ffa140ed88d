"""The folders of checkpoints on disk.

[Note: complete or not at all] A save writes into ``step-N.partial``. When all files are there, a
rename to ``step-N`` makes the checkpoint complete. If ``step-N`` exists, it becomes ``step-N.old``
just before, and is removed after. So a kill at any instant leaves a complete checkpoint, if there
was one.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from olmo_shard.data.loader import LoaderState
from olmo_shard.errors import CheckpointError, TrainingError
from olmo_shard.train.state import TrainState

STATE = "state.json"
"""File with the state beside the tensors. A folder without this file is not a checkpoint."""
_NAME = re.compile(r"step-(\d{8})(\.old)?")
_PARTIAL = ".partial"
_OLD = ".old"
# A removal that was interrupted leaves a folder with the name of a checkpoint and no marker.
_UNFINISHED = re.compile(r"step-\d{8}(\.partial|\.old)?")


class SavedState(BaseModel):
    """The state that a checkpoint holds beside its tensors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[2] = 2
    """Version of the fields. Format 1 had no digests of the data."""
    train: TrainState
    """Progress of the trainer."""
    loader: LoaderState
    """Position in the data."""
    model: dict[str, Any]
    """The section ``model`` of the config."""
    optimizer_steps: int
    """Number of steps applied (Adam's t)."""
    shapes: dict[str, list[int]]
    """Shape of every parameter over all ranks, by name."""


def folder_of(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first.

    A checkpoint that was about to be replaced (.old) counts while no complete checkpoint has its
    step.
    """
    folder = run_dir / "checkpoints"
    by_step: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = _NAME.fullmatch(path.name)
        if name and (path / STATE).is_file():
            by_step.setdefault(int(name[1]), path)  # "step-7" sorts before "step-7.old"
    return [by_step[step] for step in sorted(by_step)]


def leftovers(run_dir: Path) -> list[Path]:
    """Folders of unfinished saves, and replaced checkpoints that were not removed completely."""
    complete = set(complete_checkpoints(run_dir))
    folder = run_dir / "checkpoints"
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if _UNFINISHED.fullmatch(path.name) and path not in complete]


def remove_leftovers(run_dir: Path) -> None:
    """Remove the folders that ``leftovers`` returns.

    Only the job that holds the run's lock may call this, after a complete save. A folder that
    cannot be removed stays, and the next start reports it again.
    """
    for path in leftovers(run_dir):
        shutil.rmtree(path, ignore_errors=True)


def begin(final: Path) -> Path:
    """Create an empty folder to write into. Files that an earlier save left there are removed.

    :raises TrainingError: if the folder cannot be created.
    """
    partial = final.with_name(final.name + _PARTIAL)
    with _os_errors_as_training_errors(f"cannot save {final}"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    return partial


def commit(partial: Path, final: Path, state: SavedState) -> None:
    """Write the state and give the folder its final name.

    [Note: complete or not at all] describes the order of the operations.

    :raises TrainingError: if a file or folder cannot be written.
    """
    old = final.with_name(final.name + _OLD)
    with _os_errors_as_training_errors(f"cannot save {final}"):
        # The state is the last file: a folder without it never counts.
        _write_state(partial / STATE, state)
        # The old checkpoint counts as .old until the rename after it gives this one its name.
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        partial.rename(final)
        _sync_folder(final.parent)
    # Only now: until the folder's entry is on disk, a power failure may bring the old state back.
    shutil.rmtree(old, ignore_errors=True)


def keep_last(run_dir: Path, count: int | None) -> None:
    """Remove all but the newest complete checkpoints.

    :param count: number of checkpoints to keep; ``None`` keeps all.
    :raises TrainingError: if a folder cannot be removed.
    """
    if count is not None:
        for path in complete_checkpoints(run_dir)[:-count]:
            with _os_errors_as_training_errors(f"cannot remove {path}"):
                shutil.rmtree(path)


def read_state(path: Path) -> SavedState:
    """Read the state of a checkpoint.

    :raises CheckpointError: if the folder is not a complete checkpoint of the format that this
        version reads.
    """
    try:
        return SavedState.model_validate_json((path / STATE).read_bytes())
    except FileNotFoundError as error:
        # A common mistake is to name the run's folder instead of one of its checkpoints.
        inside = complete_checkpoints(path)
        hint = f"; name a checkpoint of this run, such as {inside[-1]}" if inside else ""
        raise CheckpointError(
            f"checkpoint {path}: no such checkpoint, or not a complete one (no {STATE}){hint}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {STATE}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        if where == "format":
            raise CheckpointError(
                f"checkpoint {path}: {STATE} has format {first['input']}, and this version reads "
                "format 2: go on with the version that wrote it, or train anew"
            ) from error
        raise CheckpointError(
            f"checkpoint {path}: {STATE} is damaged or of another version: {where} {first['msg']}"
        ) from error


@contextmanager
def _os_errors_as_training_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(f"{what}: {error.strerror}: {error.filename}") from error


def _write_state(path: Path, state: SavedState) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(state.model_dump_json(indent=2))
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    # A rename is durable only after an fsync of the folder that holds the name.
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
