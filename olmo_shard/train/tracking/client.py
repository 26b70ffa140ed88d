"""The tracker process: the only process of a job that imports W&B's client.

The client starts a service, waits for servers, retries, and can crash. In a separate process it can
neither delay nor end training, and the run can end it at any time.

The process reads one JSON object per line from its standard input and answers on its standard
output. If the run's process ends, the input ends, and the tracker process finishes within
``finish_seconds``.
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
"""Seconds per test whether the run's process still exists."""
_FINISH_SHARE = 0.7
"""Share of ``finish_seconds`` for uploads. The rest is for writing to disk and for ending."""


def main() -> None:
    """Track one run, from the request on standard input to the end of the input."""
    messages, replies = _take_pipes()
    request = Request(**json.loads(messages.readline()))
    threading.Thread(
        target=_end_after, args=(os.getppid(), request.finish_seconds), daemon=True
    ).start()
    try:
        track(request, messages, replies)
    except Exception as error:  # noqa: BLE001  (the run reports every error of the client)
        _reply(replies, failed=f"{type(error).__name__}: {error}".splitlines()[0])
        sys.exit(1)


def track(request: Request, messages: TextIO, replies: TextIO) -> None:
    """Open the W&B run, log the messages, and finish the W&B run when the input ends.

    :param request: the W&B run to open.
    :param messages: input, one JSON object per line.
    :param replies: output, one JSON object per line.
    """
    import wandb

    # 1. Online or offline? ``choosing`` names the server, whose answer may take time.
    choice = Choice("offline", request.reason)
    if request.mode == "auto":
        settings = wandb.setup().settings
        _reply(replies, choosing=settings.base_url)
        choice = choose(settings)
    _reply(replies, chosen=choice.mode)
    # 2. Open, log and finish.
    run, opened = _open(request, choice)
    _reply(replies, opened=dataclasses.asdict(opened))
    exit_code = _log_all(run, request, opened.first_step, messages)
    # 3. A timeout is no error: the files stay in the run's folder and can be uploaded later.
    try:
        run.finish(exit_code=exit_code)
    except TimeoutError:
        _reply(replies, finished=False)
    else:
        _reply(replies, finished=True)


def _open(request: Request, choice: Choice) -> tuple[Any, Opened]:
    """Open the W&B run; returns it with its description."""
    import wandb

    run = wandb.init(
        project=request.project,
        entity=request.entity,
        name=request.name,
        id=request.run_id,
        # Needed offline as well: `wandb sync` appends a segment with this setting to the earlier
        # segments, and overwrites them with a segment without it.
        resume="allow",
        dir=request.run_dir,
        config=request.config,
        mode=choice.mode,  # pyright: ignore[reportArgumentType]
        settings=wandb.Settings(
            silent=True,
            console="off",
            x_stats_pid=os.getppid(),  # measure memory and GPU of rank 0, not of this process
            # Longer than the run's limit, so that the run decides when an online start is given up.
            init_timeout=request.init_seconds + 5,
            # Shorter than the run's limit: a client that the run kills loses everything that it
            # has not written to the run's folder.
            finish_timeout=_FINISH_SHARE * request.finish_seconds,
            finish_timeout_raises=True,
        ),
    )
    # Offline, W&B does not know the steps of earlier starts; the run's records do.
    first_step = request.recorded_step + 1 if run.offline or request.has_segments else 0
    return run, Opened(
        mode=choice.mode,
        reason=choice.reason,
        url=run.url,
        folder=str(Path(run.dir).parent),
        first_step=max(first_step, run.starting_step),
    )


def _log_all(run: Any, request: Request, first_step: int, messages: TextIO) -> int:
    """Log until the input ends; returns the exit code of the run, 1 if none was received."""
    mark = request.mark
    for line in messages:
        message = json.loads(line)
        step = message.get("step", 0)
        if "exit_code" in message:
            return message["exit_code"]
        if "alert" in message:
            run.alert("olmo_shard", message["alert"])
        elif step < first_step:
            # An earlier start has logged this step, and W&B accepts each step once.
            continue
        elif "experts" in message:
            run.log({"experts/load": _picture(message["experts"])}, step=step)
        else:
            run.log(message["values"] | mark, step=step)
            mark = {}
    return 1


def _picture(experts: dict[str, Any]) -> Any:
    """The picture of expert load, as a W&B image."""
    import wandb
    from PIL import Image

    png = BytesIO()
    draw(experts, png)
    png.seek(0)
    return wandb.Image(Image.open(png))


def _take_pipes() -> tuple[TextIO, TextIO]:
    """Take standard input and output for this module alone.

    W&B's client and its service print as well, and the service inherits open files. They get an
    empty standard input, and standard error as their standard output.
    """
    messages, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    # Replace the descriptors 0 and 1 themselves, which child processes inherit.
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    return messages, replies


def _reply(replies: TextIO, **reply: Any) -> None:
    """Write one reply."""
    try:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    except BrokenPipeError:
        pass  # The run's process has ended. Its last records are finished all the same.


def _end_after(parent: int, seconds: float) -> None:
    """End this process ``seconds`` after its parent process, even if the client still waits."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    time.sleep(seconds)
    os._exit(1)


if __name__ == "__main__":
    main()
