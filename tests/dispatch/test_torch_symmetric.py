"""The heap over PyTorch's symmetric memory, against a stub of its module: two ranks whose memory
is on the CPU. What the module itself does needs GPUs.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from olmo_shard.dispatch.heap import torch_symmetric
from olmo_shard.dispatch.heap.torch_symmetric import TorchSymmetricHeap
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import HeapError
from tests.support.ranks import mesh_of

ARENA_BYTES, NUM_FLAGS = 1000, 3
FLAGS_AT = 1024
START = 64
"""Where in its allocation a tensor begins on rank 1; on rank 0 at 0."""
FAR = 2**40
"""Between an address in a process and the same in its peer, made up."""
CPU = torch.device("cpu")


class Torch:
    """Stands for the module, and for what torch.cuda is asked."""

    backend: str | None = "CUDA"
    failing: str | None = None
    unmapped = False

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.log: list[str] = []

    def step(self, name: str) -> None:
        self.log.append(name)
        if name == self.failing:
            raise RuntimeError(f"{name} went wrong")

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.step("empty")
        self.start = START * self.rank
        self.allocation = torch.full((size[0] + self.start,), 255, dtype=dtype, device=device)
        return self.allocation[self.start :]

    def rendezvous(self, memory: Tensor, group: dist.ProcessGroup) -> Any:
        self.step("rendezvous")
        assert memory.data_ptr() == self.allocation.data_ptr() + self.start
        assert not memory.any(), "zeroed before a peer can put"
        self.group = group
        own = self.allocation.data_ptr()
        peer = 0 if self.unmapped else own + FAR
        return SimpleNamespace(buffer_ptrs=[own, peer] if self.rank == 0 else [peer, own])

    def gather(self, value: Any, group: dist.ProcessGroup) -> list[Any]:
        self.log.append("gather")
        return gather_objects(value, group)


@contextmanager
def stubbed(rank: Runtime) -> Iterator[Torch]:
    stub = Torch(rank.rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "empty", stub.empty)
        patch.setattr(symmetric_memory, "rendezvous", stub.rendezvous)
        patch.setattr(symmetric_memory, "get_backend", lambda device: stub.backend)
        patch.setattr(torch.cuda, "synchronize", lambda device: stub.step("synchronize"))
        patch.setattr(torch_symmetric, "gather_objects", stub.gather)
        yield stub


def made_case(rank: Runtime) -> None:
    group = mesh_of(rank, 2).ep
    with stubbed(rank) as stub:
        heap = TorchSymmetricHeap(group, CPU, ARENA_BYTES, NUM_FLAGS)
        assert stub.group is group
        assert stub.log == ["gather", "empty", "synchronize", "rendezvous", "gather"]
        assert (heap.rank, heap.size) == (rank.rank, 2)
        assert (heap.arena.dtype, heap.arena.shape) == (torch.uint8, (ARENA_BYTES,))
        assert (heap.flags.dtype, heap.flags.shape) == (torch.int64, (NUM_FLAGS,))
        assert not heap.arena.any()
        assert not heap.flags.any()
        base = stub.allocation.data_ptr()
        assert heap.arena.data_ptr() == base + stub.start
        assert heap.flags.data_ptr() == base + stub.start + FLAGS_AT
        # The peer's tensor begins elsewhere in its allocation than the own does.
        expected = [base, base + FAR + START] if rank.rank == 0 else [base + FAR, base + START]
        assert (heap.arena_ptrs.dtype, heap.flag_ptrs.dtype) == (torch.int64, torch.int64)
        assert heap.arena_ptrs.tolist() == expected
        assert heap.flag_ptrs.tolist() == [each + FLAGS_AT for each in expected]
        assert (heap.far, heap.staging, heap.pes, heap.bitcode) == ((), None, None, None)
        stub.log.clear()
        heap.close()
        heap.close()
        assert stub.log == ["synchronize", "gather"]
        with pytest.raises(AttributeError):
            _ = heap.arena


def test_every_rank_has_every_arenas_address(ranks):
    ranks(2).run(made_case)


def refused_case(rank: Runtime, change: dict[str, Any]) -> str:
    with stubbed(rank) as stub:
        for name, value in change.items() if rank.rank == 1 else ():
            setattr(stub, name, value)
        with pytest.raises(HeapError) as raised:
            TorchSymmetricHeap(mesh_of(rank, 2).ep, CPU, ARENA_BYTES, NUM_FLAGS)
    return str(raised.value)


REFUSED = {
    "another backend": (
        {"backend": "NVSHMEM"},
        "the backend of symmetric memory is NVSHMEM, not CUDA",
    ),
    "no backend": ({"backend": None}, "the backend of symmetric memory is None, not CUDA"),
    "no room": ({"failing": "empty"}, "cannot allocate 1,048 bytes on cpu: empty went wrong"),
    "no peer access": (
        {"failing": "rendezvous"},
        "the GPUs of the group cannot map each other's memory: rendezvous went wrong",
    ),
    "a peer without a mapping": (
        {"unmapped": True},
        r"some GPUs of the group have no mapping here: \[0, \d+\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_fails_on_one_rank_is_said_on_all(ranks, case):
    change, problem = REFUSED[case]
    for found in ranks(2).run(refused_case, change):
        assert re.fullmatch(
            f"rank 1: PyTorch's symmetric memory cannot be used: {problem}; "
            "parallel.symmetric_heap: nvshmem reaches other hosts, parallel.dispatch: collective "
            "needs neither",
            found,
        ), found


def hosts_case(rank: Runtime, error: OSError | None) -> str:
    def host() -> tuple[str, int]:
        if error is not None and rank.rank == 1:
            raise error
        return f"host {rank.rank}", 1

    with stubbed(rank) as stub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_symmetric, "host_identity", host)
        with pytest.raises(HeapError) as raised:
            TorchSymmetricHeap(mesh_of(rank, 2).ep, CPU, ARENA_BYTES, NUM_FLAGS)
        assert "empty" not in stub.log
    return str(raised.value)


def test_ranks_of_two_hosts_are_refused(ranks):
    for found in ranks(2).run(hosts_case, None):
        assert "cannot be used: the ranks of the group do not share a host and a process" in found


def test_a_host_that_cannot_be_told_is_refused_on_all_ranks(ranks):
    error = FileNotFoundError(2, "No such file", "/proc/boot")
    for found in ranks(2).run(hosts_case, error):
        assert found.startswith("rank 1: PyTorch's symmetric memory cannot be used: cannot read ")
        assert "/proc/boot: No such file;" in found
