"""Heaps that all groups of a run get, or none."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import HeapError


class _Closable(Protocol):
    def close(self) -> None: ...


H = TypeVar("H", bound=_Closable)


def made_on_all(mesh: Mesh, make: Callable[[], H]) -> H:
    """What ``make`` returns; collective over all ranks.

    :param make: collective over an expert-parallel group, and fails on all of its ranks or none.
    :raises HeapError: on all ranks, with the first group's reason; what others made is closed.
    """
    heap: H | None = None
    problem: str | None = None
    try:
        heap = make()
    except HeapError as error:
        problem = str(error)
    problems = [other for other in gather_objects(problem, mesh.control) if other is not None]
    if problems:
        if heap is not None:
            heap.close()
        raise HeapError(problems[0])
    assert heap is not None
    return heap
