"""What a run and its tracker process say to each other: one JSON object per line."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Request:
    """The first line to the tracker process: the W&B run to open."""

    mode: Literal["auto", "offline"]
    reason: str
    """Why the run is to be offline; empty for ``auto``."""
    project: str
    entity: str | None
    name: str
    run_id: str
    run_dir: str
    config: dict[str, Any]
    recorded_step: int = 0
    """Last step that an earlier start of the run may have tracked; 0 if there was none."""
    has_segments: bool = False
    """Whether an earlier start left an offline segment."""
    mark: dict[str, Any] = field(default_factory=dict)
    """Values logged with the first step of this start: where and with which layout it resumed."""
    init_seconds: float
    finish_seconds: float


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The tracker process's answer: the run that it has opened."""

    mode: str
    reason: str
    url: str | None
    folder: str
    first_step: int
    """Steps below this one are in W&B already, and are not logged again."""
