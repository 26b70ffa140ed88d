"""Set a process up as one rank: device, threads, the default process group. And take it down."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from olmo_shard.config import RunConfig
from olmo_shard.distributed.environment import SINGLE, RankInfo
from olmo_shard.distributed.started_alike import Fields, check_started_alike, versions
from olmo_shard.distributed.work import wait_for_all_work
from olmo_shard.errors import ConfigurationError, LaunchError


@dataclass(frozen=True, kw_only=True)
class Runtime:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    timeout: timedelta
    threads: int


@contextmanager
def runtime(
    info: RankInfo | None = None,
    run: RunConfig | None = None,
    *,
    config: Fields | None = None,
    served: bool | None = None,
) -> Iterator[Runtime]:
    """Join the peers, and leave them at the end.

    :param info: this rank; null for a run of one process.
    :param run: device, threads and timeout.
    :param config: fields of the config by dotted name. All ranks must have equal ones, and equal
        versions of the packages: that is compared before anything depends on a config.
    :param served: whether another process serves the store at the master's port, as torchrun's
        agent and the local launcher do; null asks torchrun's variable for it.
    :raises LaunchError: where the peers do not come in time.
    :raises ConfigurationError: where the device is not there, or the ranks were started
        differently.
    """
    info, run = info or SINGLE, run or RunConfig()
    check_machine(run)
    use_cuda = _use_cuda(run.device)
    timeout = timedelta(seconds=run.timeout_seconds)
    if served is None:
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _store(info, timeout, served)
    kinds = {"configs": config or {}, "versions": versions()}
    check_started_alike(store, info.rank, info.world_size, kinds)
    local_rank, local_world_size = _local_place(info, store)
    device = _cuda_device(local_rank) if use_cuda else torch.device("cpu")
    threads = run.threads or max(1, available_cores() // local_world_size)
    torch.set_num_threads(threads)
    backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
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
        # Peers may still wait for what this rank has started.
        wait_for_all_work()
    finally:
        # A rank that failed leaves at once, too: its peers see a closed connection, no timeout.
        dist.destroy_process_group()


def _use_cuda(device: str) -> bool:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "run.device = cuda, but torch finds no CUDA device; use auto or cpu"
        )
    return device != "cpu" and torch.cuda.is_available()


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_machine(run: RunConfig) -> None:
    """:raises ConfigurationError: where this machine has not the device or the cores asked for."""
    _use_cuda(run.device)
    if run.threads is not None and run.threads > available_cores():
        raise ConfigurationError(
            f"run.threads = {run.threads} is more than the {available_cores()} core(s) that this "
            "process may use; lower it, or use null to share them among the local ranks"
        )


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
    if info.world_size == 1:
        return dist.HashStore()
    try:
        store = dist.TCPStore(
            info.master_addr,
            info.master_port,
            info.world_size,
            is_master=info.rank == 0 and not served,
            timeout=timeout,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise LaunchError(
            f"rank {info.rank} cannot meet its peers at MASTER_ADDR:MASTER_PORT = "
            f"{info.master_addr}:{info.master_port}: {str(error).splitlines()[0]}"
        ) from error
    # torchrun keeps its store when it starts the ranks again: each attempt has keys of its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"olmo_shard/{attempt}", store)


def _local_place(info: RankInfo, store: dist.Store) -> tuple[int, int]:
    if info.local_rank is not None and info.local_world_size is not None:
        return info.local_rank, info.local_world_size
    store.set(f"host/{info.rank}", socket.gethostname())
    hosts = [store.get(f"host/{rank}").decode() for rank in range(info.world_size)]
    here = [rank for rank, host in enumerate(hosts) if host == hosts[info.rank]]
    return here.index(info.rank), len(here)
