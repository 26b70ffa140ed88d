"""Run a benchmark on several CPU ranks of this machine."""

import multiprocessing
import os
import queue
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from olmo_shard.config import RunConfig
from olmo_shard.distributed.collectives import broadcast_object
from olmo_shard.distributed.environment import RankInfo
from olmo_shard.distributed.mesh import Mesh, build_mesh
from olmo_shard.distributed.runtime import runtime


def run_ranks(ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``work(mesh, *arguments)`` on every rank, and return the result of rank 0.

    All ranks form one expert-parallel group.

    :raises SystemExit: if a rank fails. The rank has printed its error.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, store.port, results, work, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        # A rank that fails sends no result: look at the exit codes once per second.
        while not any(process.exitcode for process in processes):
            try:
                return results.get(timeout=1)
            except queue.Empty:
                continue
        raise SystemExit("a rank failed; its message is above")
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def start_together(mesh: Mesh) -> float:
    """Wait until an instant that rank 0 chooses, and return it; collective.

    A barrier does not suffice: ranks leave it up to milliseconds apart.
    """
    instant = broadcast_object(time.perf_counter() + 0.01, mesh.control)
    while time.perf_counter() < instant:
        os.sched_yield()
    return instant


def _rank(
    rank: int,
    ranks: int,
    port: int,
    results: Any,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    info = RankInfo(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        master_addr="127.0.0.1",
        master_port=port,
    )
    with runtime(info, RunConfig(device="cpu"), served=True) as here:
        result = work(build_mesh(here, ranks), *arguments)
        if rank == 0:
            results.put(result)
