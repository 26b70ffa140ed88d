"""Rank and world size of this process: from torchrun's variables, from SLURM's, or a single run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from olmo_shard.errors import LaunchError

DEFAULT_PORT = 29500
_SLURM_PORTS = range(20_000, 32_768)
"""Ports below those that Linux hands out to clients (32768 to 60999 by default)."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Place of this process among its peers, as the launcher states it."""

    rank: int
    world_size: int
    local_rank: int | None
    """Rank on this host; ``None`` if the launcher does not state it. Host names decide then."""
    local_world_size: int | None
    """Number of ranks on this host; ``None`` together with ``local_rank``."""
    master_addr: str
    master_port: int
    notes: tuple[str, ...] = ()
    """Lines for the log about values that were derived, not given."""


SINGLE = RankInfo(
    rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="", master_port=0
)


def rank_from_environment(environ: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Read the launcher's variables.

    RANK, WORLD_SIZE and MASTER_ADDR, which torchrun and most launchers set, win over SLURM's
    variables: srun often starts torchrun.

    :returns: ``None`` without a launcher.
    :raises LaunchError: with the names of variables that are missing or contradict each other.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _checked(_from_torchrun(environ))
    if "LOCAL_RANK" in environ:
        raise LaunchError("LOCAL_RANK is set, but RANK and WORLD_SIZE are missing")
    # One task may be a shell under srun or a run of one rank. Both are a run without peers.
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _checked(_from_slurm(environ))
    return None


def _from_torchrun(environ: Mapping[str, str]) -> RankInfo:
    rank, world_size = _required(environ, "RANK"), _required(environ, "WORLD_SIZE")
    notes: list[str] = []
    if world_size > 1 and "MASTER_ADDR" not in environ:
        raise LaunchError(
            f"WORLD_SIZE = {world_size}, but MASTER_ADDR is missing: set it to the host of rank 0"
        )
    if world_size > 1 and "MASTER_PORT" not in environ:
        notes.append(f"MASTER_PORT is missing: using {DEFAULT_PORT}")
    local = "LOCAL_RANK" in environ and "LOCAL_WORLD_SIZE" in environ
    if not local:
        notes.append("LOCAL_RANK or LOCAL_WORLD_SIZE is missing: host names decide both")
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=_required(environ, "LOCAL_RANK") if local else None,
        local_world_size=_required(environ, "LOCAL_WORLD_SIZE") if local else None,
        master_addr=environ.get("MASTER_ADDR", ""),
        master_port=_integer(environ, "MASTER_PORT", str(DEFAULT_PORT)),
        notes=tuple(notes),
    )


def _from_slurm(environ: Mapping[str, str]) -> RankInfo:
    notes: list[str] = []
    address = environ.get("MASTER_ADDR", "")
    if not address:
        nodes = _required(environ, "SLURM_STEP_NUM_NODES")
        if nodes != 1:
            raise LaunchError(
                f"SLURM_STEP_NUM_NODES = {nodes}, but MASTER_ADDR is missing: in the batch script, "
                'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            )
        address = "127.0.0.1"
        notes.append("MASTER_ADDR is missing: one node, using 127.0.0.1")
    # The port follows from the job and the step, so two jobs on one node do not collide.
    job = _required(environ, "SLURM_JOB_ID") * 16 + _integer(environ, "SLURM_STEP_ID", "0")
    return RankInfo(
        rank=_required(environ, "SLURM_PROCID"),
        world_size=_required(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=None,
        local_world_size=None,
        master_addr=address,
        master_port=_integer(
            environ, "MASTER_PORT", str(_SLURM_PORTS.start + job % len(_SLURM_PORTS))
        ),
        notes=tuple(notes),
    )


def _checked(info: RankInfo) -> RankInfo:
    if not 0 < info.master_port < 2**16:
        raise LaunchError(f"MASTER_PORT = {info.master_port} is not between 1 and 65535")
    if info.world_size < 1 or not 0 <= info.rank < info.world_size:
        raise LaunchError(
            f"RANK = {info.rank} and WORLD_SIZE = {info.world_size} contradict each other: "
            "0 <= RANK < WORLD_SIZE must hold"
        )
    local, size = info.local_rank, info.local_world_size
    if local is None or size is None:
        return info
    if not 0 <= local < size or size > info.world_size or local > info.rank:
        raise LaunchError(
            f"LOCAL_RANK = {local}, LOCAL_WORLD_SIZE = {size}, RANK = {info.rank} and WORLD_SIZE = "
            f"{info.world_size} contradict each other: 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE <= "
            "WORLD_SIZE and LOCAL_RANK <= RANK must hold"
        )
    return info


def _required(environ: Mapping[str, str], name: str) -> int:
    if name not in environ:
        given = [key for key in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS") if key in environ]
        raise LaunchError(f"{name} is missing, although {' and '.join(given)} is set")
    return _integer(environ, name, "")


def _integer(environ: Mapping[str, str], name: str, default: str) -> int:
    text = environ.get(name, default)
    if not text.isdecimal():
        raise LaunchError(f"{name} = {text!r} is not a whole number")
    return int(text)
