"""The tracker process: the only process of a job that imports W&B's client.

It reads one JSON object per line from its standard input and answers on its standard output. The
client starts a service, waits for servers, retries and can crash; in a process of its own it cannot
hold up or end training, and the run can end it at any time. When the run's process is gone, the
input ends, and this process finishes what it has, within ``finish_seconds``.
"""

import dataclasses
import json
import os
import sys
import threading
import time
from io import BytesIO
from pathlib import Path
from typing import Any, TextIO

from olmo_shard.train.expert_picture import draw
from olmo_shard.train.tracking.messages import Opened, Request
from olmo_shard.train.tracking.server import Choice, choose

_POLL_SECONDS = 0.5
_FINISH_SHARE = 0.7
"""Share of ``finish_seconds`` for uploads; the rest is for writing to disk and ending."""


def main() -> None:
    messages, replies = _take_pipes()
    request = Request(**json.loads(messages.readline()))
    threading.Thread(
        target=_end_after, args=(os.getppid(), request.finish_seconds), daemon=True
    ).start()
    try:
        track(request, messages, replies)
    except Exception as error:  # noqa: BLE001  (any error of the client: it is the run's to report)
        _reply(replies, failed=f"{type(error).__name__}: {error}".splitlines()[0])
        sys.exit(1)


def track(request: Request, messages: TextIO, replies: TextIO) -> None:
    """Open the run, log what comes in, and finish the run when the input ends."""
    import wandb

    choice = Choice("offline", request.reason)
    if request.mode == "auto":
        settings = wandb.setup().settings
        _reply(replies, choosing=settings.base_url)
        choice = choose(settings)
    _reply(replies, chosen=choice.mode)
    run, opened = _open(request, choice)
    _reply(replies, opened=dataclasses.asdict(opened))
    exit_code = _log_all(run, request, opened.first_step, messages)
    try:
        run.finish(exit_code=exit_code)
    except TimeoutError:
        _reply(replies, finished=False)
    else:
        _reply(replies, finished=True)


def _open(request: Request, choice: Choice) -> tuple[Any, Opened]:
    import wandb

    run = wandb.init(
        project=request.project,
        entity=request.entity,
        name=request.name,
        id=request.run_id,
        # Offline too: `wandb sync` appends a segment with this setting to those before it, and
        # writes a segment without it over them.
        resume="allow",
        dir=request.run_dir,
        config=request.config,
        mode=choice.mode,  # pyright: ignore[reportArgumentType]
        settings=wandb.Settings(
            silent=True,
            console="off",
            x_stats_pid=os.getppid(),  # memory and GPU figures are rank 0's, not this process's
            # The run's own, shorter bound ends this process first.
            init_timeout=request.init_seconds + 5,
            # This bound comes before the run's: a client that is killed loses what it has not
            # written to the run's folder.
            finish_timeout=_FINISH_SHARE * request.finish_seconds,
            finish_timeout_raises=True,
        ),
    )
    first_step = request.recorded_step + 1 if run.offline or request.has_segments else 0
    return run, Opened(
        mode=choice.mode,
        reason=choice.reason,
        url=run.url,
        folder=str(Path(run.dir).parent),
        first_step=max(first_step, run.starting_step),
    )


def _log_all(run: Any, request: Request, first_step: int, messages: TextIO) -> int:
    """Log until the input ends; returns the run's exit code, 1 if the input ended unannounced."""
    mark = request.mark
    for line in messages:
        message = json.loads(line)
        step = message.get("step", 0)
        if "exit_code" in message:
            return message["exit_code"]
        if "alert" in message:
            run.alert("olmo_shard", message["alert"])
        elif step < first_step:
            continue
        elif "experts" in message:
            run.log({"experts/load": _picture(message["experts"])}, step=step)
        else:
            run.log(message["values"] | mark, step=step)
            mark = {}
    return 1


def _picture(experts: dict[str, Any]) -> Any:
    import wandb
    from PIL import Image

    png = BytesIO()
    draw(experts, png)
    png.seek(0)
    return wandb.Image(Image.open(png))


def _take_pipes() -> tuple[TextIO, TextIO]:
    """Standard input and output for this module alone.

    The client and its service print too, and the service inherits what is open: they get an empty
    input, and standard error for their output.
    """
    messages, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    return messages, replies


def _reply(replies: TextIO, **reply: Any) -> None:
    try:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    except BrokenPipeError:
        pass  # The run's process is gone; its last records are still to be finished.


def _end_after(parent: int, seconds: float) -> None:
    """End this process ``seconds`` after its parent, whatever the client waits for."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    time.sleep(seconds)
    os._exit(1)


if __name__ == "__main__":
    main()
