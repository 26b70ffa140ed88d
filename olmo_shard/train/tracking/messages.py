"""Messages between a run and its tracker process: one JSON object per line."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Request:
    """First message to the tracker process: the W&B run to open."""

    mode: Literal["auto", "offline"]
    """``auto``: online if possible. ``offline``: a segment in the run's folder."""
    reason: str
    """Reason for ``offline``; empty for ``auto``."""
    project: str
    """W&B project."""
    entity: str | None
    """W&B user or team; ``None`` means the default of the API key."""
    name: str
    """Display name."""
    run_id: str
    """W&B's id of the run, equal for all starts of a run."""
    run_dir: str
    """The run's folder."""
    config: dict[str, Any]
    """The resolved config."""
    recorded_step: int = 0
    """Last step that an earlier start of the run may have tracked; 0 if there was none."""
    has_segments: bool = False
    """Whether an earlier start left an offline segment."""
    mark: dict[str, Any] = field(default_factory=dict)
    """Values logged with the first step of this start: step and layout of the resume."""
    init_seconds: float
    """Longest time in seconds to open an online run."""
    finish_seconds: float
    """Longest time in seconds to finish after the last message."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Reply of the tracker process: the W&B run that it has opened."""

    mode: str
    """W&B's mode: ``online``, ``shared``, ``offline`` or ``disabled``."""
    reason: str
    """Reason why the run is not online; empty for an online run."""
    url: str | None
    """Address of the run; ``None`` offline."""
    folder: str
    """Folder of the run's W&B files."""
    first_step: int
    """First step to log. W&B has the steps before it from earlier starts."""
