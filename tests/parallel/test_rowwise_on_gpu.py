"""Which symmetric memory a run on GPUs takes, with stand-ins for both kinds."""

from typing import Any

import pytest
import torch

from olmo_shard.config import ParallelConfig
from olmo_shard.dispatch.heap.symmetric_heap import GpuHeap
from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout
from olmo_shard.dispatch.rowwise.rowwise_gpu import RowwiseGpuTransport
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import HeapError, LostPeerError
from olmo_shard.kernels.backend import Backend
from olmo_shard.parallel import rowwise_on_gpu
from olmo_shard.parallel.rowwise_on_gpu import RowwiseOnGpu
from olmo_shard.parallel.transport_candidate import DispatchRequest
from tests.support.ranks import StartRanks, mesh_of

LAYOUT = MailboxLayout(num_ranks=2, max_rows=4, num_slots=2, width=8, dtype=torch.float32)


def request(heap: str = "auto", backend: Backend = "triton") -> DispatchRequest:
    """A request whose mailboxes have the layout above."""
    return DispatchRequest(
        parallel=ParallelConfig.model_validate({"expert_parallel": 2, "symmetric_heap": heap}),
        num_experts=4,
        top_k=2,
        width=8,
        max_tokens=4,
        device_type="cuda",
        backend=backend,
    )


class Heap(GpuHeap):
    """Memory that no other process reaches."""

    remote_ranks = ()
    staging = pes = bitcode = None
    closed = 0

    def __init__(self, group: Any, device: torch.device, arena_bytes: int, num_flags: int) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.arena = torch.zeros(arena_bytes, dtype=torch.uint8)
        self.flags = torch.zeros(num_flags, dtype=torch.int64)
        self.arena_ptrs = self.flag_ptrs = torch.ones(self.size, dtype=torch.int64)

    def close(self) -> None:
        """Count the calls."""
        type(self).closed += 1


class Nvshmem(Heap):
    """Stands for NVSHMEM."""


class Torch(Heap):
    """Stands for PyTorch's symmetric memory."""


def failing(rank: int | None, kind: type[Heap], problem: str) -> type[Heap]:
    """A heap that fails on the ranks of one group only."""

    class Failing(kind):
        def __init__(self, group: Any, *rest: Any) -> None:
            if rank is None or rank in torch.distributed.get_process_group_ranks(group):
                raise HeapError(problem)
            super().__init__(group, *rest)

    return Failing


def taken_case(rank: Runtime, heap: str, machine: dict[str, Any]) -> str:
    """The heap that was taken and the note on it, or the error."""
    mesh = mesh_of(rank, 2)
    nvshmem, torch_heap = Nvshmem, Torch
    if "nvshmem fails" in machine:
        nvshmem = failing(machine["nvshmem fails"], Nvshmem, "no bootstrap")
    if "torch fails" in machine:
        torch_heap = failing(None, Torch, "no mapping")
    with pytest.MonkeyPatch.context() as patch:
        missing = machine.get("missing") if rank.rank == 1 else None
        real_nvshmem, real_torch = rowwise_on_gpu.HEAPS
        heaps = (
            real_nvshmem._replace(problem=lambda device: missing, create=nvshmem),
            real_torch._replace(problem=lambda device: None, create=torch_heap),
        )
        patch.setattr(rowwise_on_gpu, "HEAPS", heaps)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        try:
            transport, note = RowwiseOnGpu().create(request(heap), mesh)
        except HeapError as error:
            return f"refused: {error}"
    assert isinstance(transport, RowwiseGpuTransport)
    mailbox = transport.mailbox
    assert mailbox.layout == LAYOUT
    assert mailbox.regions == LAYOUT.regions(mesh.ep.rank())
    other = rank.rank ^ 1  # its neighbour in the group
    mailbox.error[other % 2] = 1
    with pytest.raises(LostPeerError, match=rf"^rank {rank.rank} .* for rank\(s\) {other}, here"):
        mailbox.check("here")
    assert note.startswith(f"{LAYOUT.describe()}; ")
    return f"{type(mailbox.heap).__name__} {note.partition('; ')[2]}"


MISSING = {"missing": "nvshmem4py-cu13 is not installed"}
OTHERS = "PyTorch's symmetric memory"


@pytest.mark.parametrize(
    ("heap", "machine", "taken"),
    [
        ("auto", {}, "Nvshmem over NVSHMEM"),
        ("nvshmem", {}, "Nvshmem over NVSHMEM"),
        ("torch", {}, f"Torch over {OTHERS}"),
        ("auto", MISSING, f"Torch over {OTHERS} (not NVSHMEM: rank 1: {MISSING['missing']})"),
        ("nvshmem", MISSING, f"refused: rank 1: {MISSING['missing']}"),
        ("auto", {"nvshmem fails": 2}, f"Torch over {OTHERS} (not NVSHMEM: no bootstrap)"),
        ("nvshmem", {"nvshmem fails": 2}, "refused: no bootstrap"),
        ("torch", {"torch fails": True}, "refused: no mapping"),
        ("auto", MISSING | {"torch fails": True}, "refused: no mapping"),
    ],
)
def test_every_rank_takes_the_same_heap(
    ranks: StartRanks, heap: str, machine: dict[str, Any], taken: str
) -> None:
    """Whichever rank, or whichever group of ranks, has the obstacle."""
    assert set(ranks(4).run(taken_case, heap, machine)) == {taken}


def test_triton_moves_rows_on_gpus() -> None:
    assert RowwiseOnGpu().problem(request()) is None
    problem = RowwiseOnGpu().problem(request(backend="reference"))
    assert problem is not None
    assert "parallel.kernels = reference" in problem
