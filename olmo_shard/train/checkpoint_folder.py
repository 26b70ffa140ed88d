"""Where checkpoints lie, and how one appears: complete, by a rename, or not at all."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from olmo_shard.errors import CheckpointError

STATE = "state.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8})(\.old)?")
_PARTIAL = ".partial"
_OLD = ".old"
_KEYS = {"format", "train", "loader", "optimizer_steps", "shapes"}


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first.

    One that was about to be replaced (.old) counts as long as its successor has not got its name.
    """
    folder = run_dir / "checkpoints"
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = _NAME.fullmatch(path.name)
        if name and (path / STATE).is_file():
            found.setdefault(int(name[1]), path)  # "step-7" sorts before "step-7.old"
    return [found[step] for step in sorted(found)]


def begin(final: Path) -> Path:
    """An empty folder to write into; what an earlier try left there is removed.

    :raises CheckpointError: where it cannot be made.
    """
    partial = final.with_name(final.name + _PARTIAL)
    with _told_as(f"cannot save {final}"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    return partial


def commit(partial: Path, final: Path, state: dict[str, Any]) -> None:
    """Write the state and give the folder its name.

    A kill at any instant leaves a complete checkpoint, if there was one.

    :raises CheckpointError: where something cannot be written.
    """
    old = final.with_name(final.name + _OLD)
    with _told_as(f"cannot save {final}"):
        _write_state(partial / STATE, {"format": FORMAT, **state})
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        partial.rename(final)
        _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def keep_last(run_dir: Path, count: int | None) -> None:
    """Remove all but the newest complete checkpoints."""
    if count is not None:
        for path in complete_checkpoints(run_dir)[:-count]:
            with _told_as(f"cannot remove {path}"):
                shutil.rmtree(path)


def read_state(path: Path) -> dict[str, Any]:
    """:raises CheckpointError: where the folder is no complete checkpoint of a known format."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        inside = complete_checkpoints(path)
        hint = (
            f"; it is a run's folder, name one of its checkpoints: {inside[-1]}" if inside else ""
        )
        raise CheckpointError(
            f"checkpoint {path}: no such checkpoint, or not a complete one (no {STATE}){hint}"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"checkpoint {path}: {STATE} cannot be read: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else state
        raise CheckpointError(
            f"checkpoint {path}: format {found!r}, but this version reads {FORMAT}"
        )
    missing = sorted(_KEYS - state.keys())
    if missing:
        raise CheckpointError(f"checkpoint {path}: {STATE} lacks {', '.join(missing)}")
    return state


@contextmanager
def _told_as(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror}: {error.filename}") from error


def _write_state(path: Path, state: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(state, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
