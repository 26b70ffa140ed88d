"""Which rank a process is, from the launcher's variables."""

from typing import Any

import pytest

from olmo_shard.distributed.environment import rank_from_environment
from olmo_shard.errors import LaunchError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_NODES": "1",
}


def test_no_launcher() -> None:
    assert rank_from_environment({"PATH": "/bin"}) is None


def test_a_shell_under_srun_is_no_launcher() -> None:
    assert rank_from_environment({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_torchrun() -> None:
    info = rank_from_environment(TORCHRUN)
    assert info is not None
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (3, 4, 1, 2)
    assert (info.master_addr, info.master_port, info.notes) == ("10.0.0.1", 1234, ())


def test_torchrun_under_srun_wins() -> None:
    info = rank_from_environment(SLURM | TORCHRUN)
    assert info is not None
    assert info.rank == 3


def test_rank_and_world_size_alone_leave_the_local_rank_to_be_found() -> None:
    info = rank_from_environment({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"})
    assert info is not None
    assert info.local_rank is None
    assert set(info.notes) == {
        "LOCAL_RANK or LOCAL_WORLD_SIZE is missing: both found by host names",
        "MASTER_PORT is missing: using 29500",
    }


def test_slurm() -> None:
    info = rank_from_environment(SLURM)
    assert info is not None
    assert (info.rank, info.world_size, info.master_addr) == (2, 4, "127.0.0.1")
    assert info.master_port == 20_000 + (77 * 16 + 1) % 20_000
    other = rank_from_environment(SLURM | {"SLURM_JOB_ID": "78"})
    assert other is not None
    assert other.master_port != info.master_port


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, r"RANK is missing, although WORLD_SIZE is set"),
        ({"WORLD_SIZE": None}, r"WORLD_SIZE is missing, although RANK is set"),
        ({"MASTER_ADDR": None}, r"WORLD_SIZE = 4, but MASTER_ADDR is missing"),
        ({"RANK": "4"}, r"RANK = 4 and WORLD_SIZE = 4 contradict"),
        ({"RANK": "first"}, r"RANK = 'first' is not a whole number"),
        ({"WORLD_SIZE": "-1"}, r"WORLD_SIZE = '-1' is not a whole number"),
        ({"LOCAL_RANK": "2"}, r"LOCAL_RANK = 2, LOCAL_WORLD_SIZE = 2.*contradict"),
        ({"LOCAL_WORLD_SIZE": "8"}, r"LOCAL_WORLD_SIZE = 8.*contradict"),
        ({"MASTER_PORT": "99999"}, r"MASTER_PORT = 99999 is not between 1 and 65535"),
        ({"MASTER_PORT": "0"}, r"MASTER_PORT = 0 is not between 1 and 65535"),
        ({"RANK": None, "WORLD_SIZE": None}, r"LOCAL_RANK is set, but RANK and WORLD_SIZE are"),
        ({"MASTER_PORT": ""}, r"MASTER_PORT = '' is not a whole number"),
    ],
)
def test_missing_or_contradicting_variables_are_named(change: dict[str, Any], message: str) -> None:
    environ = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
    with pytest.raises(LaunchError, match=message):
        rank_from_environment(environ)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": None}, r"SLURM_PROCID is missing, although SLURM_STEP_NUM_TASKS is set"),
        ({"SLURM_STEP_NUM_NODES": None}, r"SLURM_STEP_NUM_NODES is missing"),
        ({"SLURM_STEP_NUM_NODES": "2"}, r"SLURM_STEP_NUM_NODES = 2, but MASTER_ADDR is missing"),
    ],
)
def test_slurms_variables_are_named_too(change: dict[str, Any], message: str) -> None:
    environ = {k: v for k, v in (SLURM | change).items() if v is not None}
    with pytest.raises(LaunchError, match=message):
        rank_from_environment(environ)
