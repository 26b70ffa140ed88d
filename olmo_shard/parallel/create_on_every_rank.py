"""Create a resource in every expert-parallel group of a run, or in none."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import HeapError


class _Closable(Protocol):
    def close(self) -> None:
        """Free the resource."""
        ...


R = TypeVar("R", bound=_Closable)


def create_on_every_rank(mesh: Mesh, create: Callable[[], R]) -> R:
    """Return what ``create`` returns, if it succeeds on all ranks; collective over all ranks.

    :param create: collective over an expert-parallel group; fails on all ranks of a group or on
        none.
    :raises HeapError: on all ranks, with the reason of the first group that failed. Resources that
        other groups have created are closed.
    """
    resource: R | None = None
    problem: str | None = None
    try:
        resource = create()
    except HeapError as error:
        problem = str(error)
    # Groups fail one by one; a run needs the resource in all of them.
    problems = [reason for reason in gather_objects(problem, mesh.control) if reason is not None]
    if problems:
        if resource is not None:
            resource.close()
        raise HeapError(problems[0])
    assert resource is not None
    return resource
