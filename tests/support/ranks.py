"""Groups of gloo ranks that start once per session and run many cases.

A case is a module-level function ``case(rank: Runtime, *args)``. ``group.run(case, *args)`` runs
the case on every rank and returns the results in rank order. An exception on any rank fails the
test with that rank's traceback.
"""

import multiprocessing as mp
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import TCPStore

from olmo_shard.config import RunConfig
from olmo_shard.distributed.environment import RankInfo
from olmo_shard.distributed.mesh import Mesh, build_mesh
from olmo_shard.distributed.runtime import Runtime, runtime

_CASE_SECONDS = 240
_meshes: dict[int, Mesh] = {}


def mesh_of(rank: Runtime, expert_parallel: int = 1) -> Mesh:
    """The mesh of this rank, created on the first call; collective."""
    if expert_parallel not in _meshes:
        _meshes[expert_parallel] = build_mesh(rank, expert_parallel)
    return _meshes[expert_parallel]


def _context(interpreted: bool) -> Any:
    """The way in which ranks start.

    Ranks are forked from a process that has imported all modules, which saves seconds per rank.
    Triton reads at import whether to interpret, so interpreted ranks import their modules anew.
    """
    if interpreted:
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.tiny"])
    return context


class RankGroup:
    """``size`` processes that wait for cases.

    :param interpreted: run Triton kernels in the interpreter, which is a mode of a whole process.
    """

    def __init__(self, size: int, *, interpreted: bool = False) -> None:
        context = _context(interpreted)
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._pipes: list[Any] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, self._store.port)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with _environment(TRITON_INTERPRET="1" if interpreted else "0"):
                process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a case on every rank, and return the results in rank order.

        :raises AssertionError: if a rank raises, with its traceback.
        """
        outcomes = self.outcomes(case, *args)
        failed = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(outcomes) if error]
        assert not failed, "\n".join(failed)
        return [value for _, value in outcomes]

    def outcomes(self, case: Callable[..., Any], *args: Any) -> list[tuple[str | None, Any]]:
        """Run a case on every rank. Returns per rank: traceback or ``None``, and result."""
        for pipe in self._pipes:
            pipe.send((case, args))
        return [self._outcome(rank, pipe) for rank, pipe in enumerate(self._pipes)]

    def kill(self) -> None:
        """Kill all ranks, without clean-up."""
        for process in self._processes:
            process.kill()
            process.join()
            process.close()

    def close(self) -> None:
        """End all ranks."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()

    def _outcome(self, rank: int, pipe: Any) -> tuple[str | None, Any]:
        if not pipe.poll(_CASE_SECONDS):
            return f"no answer within {_CASE_SECONDS} s", None
        try:
            return pipe.recv()
        except EOFError:
            return "the process ended", None


class Groups:
    """Rank groups by size, each created at its first use.

    :param interpreted: see ``RankGroup``.
    """

    def __init__(self, *, interpreted: bool = False) -> None:
        self._interpreted = interpreted
        self._groups: dict[int, RankGroup] = {}

    def __call__(self, size: int) -> RankGroup:
        """The group of ``size`` ranks."""
        if size not in self._groups:
            self._groups[size] = RankGroup(size, interpreted=self._interpreted)
        return self._groups[size]

    def close(self) -> None:
        """End the ranks of all groups."""
        for group in self._groups.values():
            group.close()


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables for processes that start inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(pipe: Any, rank: int, size: int, port: int) -> None:
    warnings.simplefilter("error")
    # torch's own modules warn about each other when torch.compile is first used.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
    info = RankInfo(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        master_addr="127.0.0.1",
        master_port=port,
    )
    # The store is served by the test process, as a launcher would.
    with runtime(
        info, RunConfig(device="cpu", timeout_seconds=120, threads=1), served=True
    ) as place:
        while (job := pipe.recv()) is not None:
            case, args = job
            try:
                pipe.send((None, case(place, *args)))
            except Exception:  # noqa: BLE001  (the test process reports it)
                pipe.send((traceback.format_exc(), None))


StartRanks = Callable[[int], RankGroup]
"""Type of the fixtures ``ranks`` and ``interpreted``: a running group of so many ranks."""
