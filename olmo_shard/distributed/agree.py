"""Run an action on one rank or on all ranks, and make every rank see the same result or error."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from olmo_shard.distributed import collectives
from olmo_shard.errors import OlmoShardError

T = TypeVar("T")


def on_every_rank(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank of the group; return this rank's result. Collective.

    :raises OlmoShardError: on every rank, if the action fails on some: the error of the lowest such
        rank, with that rank's number.
    """
    result: Any = None
    problem: OlmoShardError | None = None
    try:
        result = action()
    except OlmoShardError as error:
        problem = error
    # All ranks exchange their errors, also those that succeeded: they must raise, too.
    for rank, other in enumerate(collectives.gather_objects(problem, group)):
        if other is not None:
            named = f"rank {dist.get_global_rank(group, rank)}: {other}"
            raise type(other)(named if group.size() > 1 else str(other))
    return result


def on_first_rank(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run ``action`` on the group's first rank; return its result on every rank. Collective.

    Use it for questions to a file system: ranks that ask separately may get different answers, and
    then wait for each other in different collectives.

    :raises OlmoShardError: on every rank, if the action fails.
    """
    outcome: Any = None
    if group.rank() == 0:
        try:
            outcome = action()
        except OlmoShardError as error:
            outcome = error
    # An error travels as the result does, so no rank waits for one that has raised.
    outcome = collectives.broadcast_object(outcome, group)
    if isinstance(outcome, OlmoShardError):
        raise outcome
    return outcome
