"""Set-up and tear-down of a process as one rank: device, threads, the default process group."""

import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction

import torch
import torch.distributed as dist

from olmo_shard.config import RunConfig
from olmo_shard.distributed.environment import SINGLE, RankInfo
from olmo_shard.distributed.long_waits import long_waits
from olmo_shard.distributed.start_consistency import Fields, check_consistent_start, versions
from olmo_shard.distributed.work import wait_for_all_work
from olmo_shard.errors import ConfigurationError, LaunchError


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """This process as a rank of a run."""

    rank: int
    world_size: int
    local_rank: int
    """Rank among the ranks of this host."""
    local_world_size: int
    """Number of ranks on this host."""
    device: torch.device
    timeout: timedelta
    """Longest wait for a peer."""
    threads: int
    """CPU threads of this rank."""


@contextmanager
def runtime(
    info: RankInfo | None = None,
    run: RunConfig | None = None,
    *,
    config: Fields | None = None,
    served: bool | None = None,
) -> Iterator[Runtime]:
    """Join the peers, and leave them at the end.

    :param info: this rank; ``None`` for a run of one process.
    :param run: device, threads and timeout.
    :param config: fields of the config by dotted name. They and the versions of the packages must
        be equal on all ranks. The ranks compare them before anything depends on the config.
    :param served: whether another process serves the store at the master's port, as torchrun's
        agent and the local launcher do. ``None`` reads it from torchrun's variable.
    :raises LaunchError: if the peers do not join in time.
    :raises ConfigurationError: if the device is missing, or the ranks were started differently.
    """
    # 1. What this machine must offer, before any peer waits.
    info, run = info or SINGLE, run or RunConfig()
    check_machine(run)
    use_cuda = _use_cuda(run.device)
    timeout = timedelta(seconds=run.timeout_seconds)
    if served is None:
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    with _reported_waits(info, timeout):
        # 2. Meet the peers at the store, and compare how each of them was started.
        kinds = {"configs": config or {}, "versions": versions()}
        with long_waits.watch("start of the other ranks", lambda: range(info.world_size)):
            store = _store(info, timeout, served)
            check_consistent_start(store, info.rank, info.world_size, kinds)
            local_rank, local_world_size = _local_place(info, store)

        # 3. Device, threads and process group, which depend on the place among the local ranks.
        device = _cuda_device(local_rank) if use_cuda else torch.device("cpu")
        threads = run.threads or _thread_share(store, local_rank, local_world_size)
        torch.set_num_threads(threads)
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
        with long_waits.watch("set-up of process groups", lambda: range(info.world_size)):
            dist.init_process_group(
                backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout
            )
        try:
            yield Runtime(
                rank=info.rank,
                world_size=info.world_size,
                local_rank=local_rank,
                local_world_size=local_world_size,
                device=device,
                timeout=timeout,
                threads=threads,
            )
            # Peers may still need this rank's part of collectives that are under way.
            wait_for_all_work()
        finally:
            # Also after a failure, at once: the peers see a closed connection and not a timeout.
            dist.destroy_process_group()


@contextmanager
def _reported_waits(info: RankInfo, timeout: timedelta) -> Iterator[None]:
    """Report long waits for peers, if there are any."""
    if info.world_size > 1:
        long_waits.start(info.rank, timeout.total_seconds())
    try:
        yield
    finally:
        long_waits.stop()


def _use_cuda(device: str) -> bool:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "run.device = cuda, but torch finds no CUDA device; use auto or cpu"
        )
    return device != "cpu" and torch.cuda.is_available()


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(_usable_cores())


def _usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def check_machine(run: RunConfig) -> None:
    """Check that this machine has the device and the cores that the config asks for.

    :raises ConfigurationError: if it does not.
    """
    _use_cuda(run.device)
    if run.threads is not None and run.threads > available_cores():
        raise ConfigurationError(
            f"run.threads = {run.threads} is more than the {available_cores()} core(s) that this "
            "process may use; lower it, or use null to share them among the local ranks"
        )


def _thread_share(store: dist.Store, local_rank: int, local_world_size: int) -> int:
    """Divide each core among the local ranks that may use it; collective over the local ranks.

    A launcher gives all local ranks the same cores, or binds each of them to cores of its own.
    """
    host = socket.gethostname()
    store.set(f"cores/{host}/{local_rank}", json.dumps(_usable_cores()))
    by_rank = [json.loads(store.get(f"cores/{host}/{rank}")) for rank in range(local_world_size)]
    ranks_of_core = Counter(core for cores in by_rank for core in cores)
    return max(1, int(sum(Fraction(1, ranks_of_core[core]) for core in by_rank[local_rank])))


def _cuda_device(local_rank: int) -> torch.device:
    if local_rank >= torch.cuda.device_count():
        raise ConfigurationError(
            f"local rank {local_rank} has no GPU: this host has {torch.cuda.device_count()}; "
            "start fewer ranks or set run.device=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _store(info: RankInfo, timeout: timedelta, served: bool) -> dist.Store:
    """Connect to the store; waits until rank 0 or the launcher serves it."""
    if info.world_size == 1:
        return dist.HashStore()
    try:
        store = dist.TCPStore(
            info.master_addr,
            info.master_port,
            info.world_size,
            is_master=info.rank == 0 and not served,
            timeout=timeout,
            # The comparison of the starts waits for the others: it names what differs.
            wait_for_workers=False,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise LaunchError(
            f"rank {info.rank} cannot meet its peers at MASTER_ADDR:MASTER_PORT = "
            f"{info.master_addr}:{info.master_port}: {str(error).splitlines()[0]}"
        ) from error
    # torchrun keeps its store when it restarts the ranks, so each attempt uses its own keys.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own_keys = dist.PrefixStore(f"olmo_shard/{attempt}", store)
    long_waits.share(own_keys, info.world_size)
    return own_keys


def _local_place(info: RankInfo, store: dist.Store) -> tuple[int, int]:
    """Return local rank and local world size: the launcher's, or derived from host names."""
    if info.local_rank is not None and info.local_world_size is not None:
        return info.local_rank, info.local_world_size
    store.set(f"host/{info.rank}", socket.gethostname())
    hosts = [store.get(f"host/{rank}").decode() for rank in range(info.world_size)]
    local_ranks = [rank for rank, host in enumerate(hosts) if host == hosts[info.rank]]
    return local_ranks.index(info.rank), len(local_ranks)
