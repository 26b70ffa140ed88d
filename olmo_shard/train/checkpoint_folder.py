"""Where checkpoints lie, and how one appears: complete, by a rename, or not at all."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from olmo_shard.errors import CheckpointError

STATE = "state.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")
_PARTIAL = ".partial"
_OLD = ".old"


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    folder = run_dir / "checkpoints"
    names = (
        [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    )
    return sorted(path for path in names if (path / STATE).is_file())


def begin(final: Path) -> Path:
    """An empty folder to write into; what an earlier try left there is removed."""
    partial = final.with_name(final.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, final: Path, state: dict[str, Any]) -> None:
    """Write the state and give the folder its name. A kill at any instant leaves a complete
    checkpoint."""
    path = partial / STATE
    with path.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **state}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    old = final.with_name(final.name + _OLD)
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def keep_last(run_dir: Path, count: int | None) -> None:
    """Remove all but the newest complete checkpoints."""
    if count is not None:
        for path in complete_checkpoints(run_dir)[:-count]:
            shutil.rmtree(path)


def read_state(path: Path) -> dict[str, Any]:
    """:raises CheckpointError: where the folder is no complete checkpoint of a known format."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {path}: no such checkpoint, or not a complete one (it has no {STATE})"
        ) from error
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"checkpoint {path}: {STATE} cannot be read: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {path}: format {state.get('format')!r}, but this version reads {FORMAT}"
        )
    return state


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
