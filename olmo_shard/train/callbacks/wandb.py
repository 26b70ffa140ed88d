"""Weights & Biases: one run a job, on rank 0. The tracker never decides the run's fate."""

import netrc
import os
import shlex
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from rich.console import Console as RichConsole

from olmo_shard.train.callbacks.base import Callback, RunInfo

_CONNECT_SECONDS = 2.0


class WandB(Callback):
    """Logs the records of metrics.jsonl on one step axis.

    An offline run is written in segments, one for each start of the job, under one run id; the
    checkpoint keeps the id and the list, and the summary prints the command that uploads them in
    order.
    """

    def __init__(self, console: RichConsole) -> None:
        self.console = console
        self._run: Any = None
        self._info: RunInfo | None = None
        self._offline = True

    def on_start(self, run: RunInfo) -> None:
        self._info = run
        self._guarded(self._open)

    def on_step(self, record: dict[str, Any]) -> None:
        self._log(flatten(record))

    def on_eval(self, step: int, losses: dict[str, float | None]) -> None:
        self._log({"step": step, **{f"eval/{name}": loss for name, loss in losses.items()}})

    def on_note(self, message: str) -> None:
        if self._run is not None:
            self._guarded(lambda: self._run.alert("olmo_shard", message))

    def on_end(self) -> list[tuple[str, str]]:
        self._guarded(lambda: self._run.finish() if self._run else None)
        if self._info is None or self._run is None:
            return []
        if not self._offline:  # a disabled run has no address
            return [("W&B run", self._run.url)] if self._run.url else []
        segments = self._info.state.tracker_segments
        command = shlex.join(["wandb", "sync", *segments])
        return [("W&B offline run", segments[-1]), ("to upload it", command)]

    def on_failure(self) -> None:
        self._guarded(lambda: self._run.finish(exit_code=1) if self._run else None)

    def _open(self) -> None:
        import wandb

        info = self._info
        assert info is not None
        tracking, state = info.config.tracking, info.state
        mode = "offline" if tracking.wandb == "offline" else choose_mode()
        state.tracker_run_id = state.tracker_run_id or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=tracking.project,
            entity=tracking.entity,
            name=tracking.name or info.run_dir.name,
            id=state.tracker_run_id,
            resume=None if mode == "offline" else "allow",
            dir=str(info.run_dir),
            config=info.config.model_dump(),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._offline = self._run.offline
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if self._offline:
            state.tracker_segments.append(str(Path(self._run.dir).parent))

    def _log(self, values: dict[str, Any]) -> None:
        if self._run is not None:
            self._guarded(lambda: self._run.log(values))

    def _guarded(self, action: Callable[[], Any]) -> None:
        """Call the tracker; whatever it raises is reported once, and tracking ends there."""
        try:
            action()
        except Exception as error:  # noqa: BLE001  (any error of the tracker, and training goes on)
            self._run = None
            self.console.print(
                f"W&B stopped: {type(error).__name__}: {error}; the run goes on, "
                "metrics.jsonl has every step",
                markup=False,
            )


def choose_mode() -> Literal["online", "offline"] | None:
    """Online where a key is at hand and the server answers; null leaves it to ``WANDB_MODE``."""
    import wandb

    if "WANDB_MODE" in os.environ:
        return None
    settings = wandb.Settings()
    has_key = settings.api_key or _in_netrc(settings.base_url)
    return "online" if has_key and _reachable(settings.base_url) else "offline"


def flatten(record: dict[str, Any]) -> dict[str, Any]:
    """Lists over MoE layers become one value a layer: ``moe/0/load_max_over_mean``.

    Figures by kind become one value a kind: ``wire_bytes_by_kind/reduce``.
    """
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, list):
            flat |= {f"moe/{layer}/{name}": each for layer, each in enumerate(value)}
        elif isinstance(value, dict):
            flat |= {f"{name}/{kind}": each for kind, each in value.items()}
        else:
            flat[name] = value
    return flat


def _in_netrc(url: str) -> bool:
    try:
        return netrc.netrc().authenticators(urlparse(url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _reachable(url: str) -> bool:
    parsed = urlparse(url)
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    try:
        socket.create_connection((parsed.hostname or "", port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
