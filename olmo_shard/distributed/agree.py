"""Things that all ranks must see alike."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from olmo_shard.distributed import collectives
from olmo_shard.errors import OlmoShardError

T = TypeVar("T")


def on_every_rank(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run ``action`` on all ranks; if it fails on some, every rank raises the first one's error."""
    result: Any = None
    problem: OlmoShardError | None = None
    try:
        result = action()
    except OlmoShardError as error:
        problem = error
    for rank, other in enumerate(collectives.gather_objects(problem, group)):
        if other is not None:
            named = f"rank {dist.get_global_rank(group, rank)}: {other}"
            raise type(other)(named if group.size() > 1 else str(other))
    return result


def on_first_rank(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run ``action`` on the group's first rank; every rank gets its result, or raises its error.

    Ranks that ask a file system each for itself may get different answers, and then wait for each
    other in different collectives.
    """
    outcome: Any = None
    if group.rank() == 0:
        try:
            outcome = action()
        except OlmoShardError as error:
            outcome = error
    outcome = collectives.broadcast_object(outcome, group)
    if isinstance(outcome, OlmoShardError):
        raise outcome
    return outcome
