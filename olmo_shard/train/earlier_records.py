"""Records of an earlier start in the run's folder: they move to a numbered folder.

A new run must not overwrite the records of another start, for example of one that failed before its
first checkpoint. No record is deleted.
"""

from pathlib import Path

from olmo_shard.errors import ConfigurationError
from olmo_shard.train.records import (
    CONFIG_FILE,
    EVAL_FILE,
    EVENTS_FILE,
    EXPERTS_FILE,
    EXPERTS_PICTURE,
    LOSS_PICTURE,
    METRICS_FILE,
)
from olmo_shard.train.rewind import STEP_FILES, replaced_file

# Files that move first. ``_LAST`` move last, because they show that the folder has records: a move
# that is interrupted is done again at the next start.
_FIRST = (
    CONFIG_FILE,
    LOSS_PICTURE,
    EXPERTS_PICTURE,
    EXPERTS_FILE,
    *(replaced_file(Path(name)).name for name in STEP_FILES),
)
_LAST = (EVENTS_FILE, EVAL_FILE, METRICS_FILE)


def set_aside(run_dir: Path) -> Path | None:
    """Move the records of an earlier start to ``earlier-N``. The caller must hold the run's lock.

    :returns: the new folder; ``None`` if the run's folder has no records.
    :raises ConfigurationError: if a file cannot be moved.
    """
    if not any(_has_content(run_dir / name) for name in _LAST):
        return None
    try:
        folder = _numbered_folder(run_dir)
        for name in (*_FIRST, *_LAST):
            if (run_dir / name).exists():
                (run_dir / name).rename(folder / name)
    except OSError as error:
        raise ConfigurationError(
            f"run.dir = {run_dir} holds the records of an earlier start, and they cannot be moved "
            f"away: {error.strerror}: {error.filename}; choose another run.dir"
        ) from error
    return folder


def _has_content(path: Path) -> bool:
    """Whether a file exists and is not empty."""
    return path.is_file() and path.stat().st_size > 0


def _numbered_folder(run_dir: Path) -> Path:
    """Create the next free ``earlier-N``."""
    number = 1
    while (folder := run_dir / f"earlier-{number}").exists():
        number += 1
    folder.mkdir()
    return folder
