"""Whose symmetric memory a run on GPUs takes, with stand-ins for both. Runs on gloo."""

from typing import Any

import pytest
import torch

from olmo_shard.config import ParallelConfig
from olmo_shard.dispatch.heap.device import DeviceHeap
from olmo_shard.dispatch.mailbox import MailboxLayout
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import HeapError, LostPeerError
from olmo_shard.parallel import gpu_mailbox
from tests.support.ranks import mesh_of

LAYOUT = MailboxLayout(num_ranks=2, max_rows=4, num_slots=2, width=8, dtype=torch.float32)


class Heap(DeviceHeap):
    """Memory that nobody reaches."""

    far = ()
    staging = pes = bitcode = None
    closed = 0

    def __init__(self, group: Any, device: torch.device, arena_bytes: int, num_flags: int) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.arena = torch.zeros(arena_bytes, dtype=torch.uint8)
        self.flags = torch.zeros(num_flags, dtype=torch.int64)
        self.arena_ptrs = self.flag_ptrs = torch.ones(self.size, dtype=torch.int64)

    def close(self) -> None:
        type(self).closed += 1


class Nvshmem(Heap):
    pass


class Torch(Heap):
    pass


def failing(rank: int | None, kind: type[Heap], problem: str) -> type[Heap]:
    """Fails on the ranks of one group, after others have theirs."""

    class Failing(kind):
        def __init__(self, group: Any, *rest: Any) -> None:
            if rank is None or rank in torch.distributed.get_process_group_ranks(group):
                raise HeapError(problem)
            super().__init__(group, *rest)

    return Failing


def taken_case(rank: Runtime, heap: str, said: dict[str, Any]) -> str:
    """The heap that was taken and what is said of it, or the error."""
    mesh = mesh_of(rank, 2)
    nvshmem, torch_heap = Nvshmem, Torch
    if "nvshmem fails" in said:
        nvshmem = failing(said["nvshmem fails"], Nvshmem, "no bootstrap")
    if "torch fails" in said:
        torch_heap = failing(None, Torch, "no mapping")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_mailbox, "NvshmemHeap", nvshmem)
        patch.setattr(gpu_mailbox, "TorchSymmetricHeap", torch_heap)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        missing = said.get("missing") if rank.rank == said.get("missing on", 1) else None
        patch.setattr(gpu_mailbox.nvshmem, "unsupported", lambda device: missing)
        config = ParallelConfig.model_validate({"expert_parallel": 2, "symmetric_heap": heap})
        try:
            mailbox, note = gpu_mailbox.gpu_mailbox(mesh, LAYOUT, config)
        except HeapError as error:
            return f"refused: {error}"
    assert mailbox.regions == LAYOUT.regions(mesh.ep.rank())
    other = rank.rank ^ 1  # its neighbour, in whichever group
    mailbox.error[other % 2] = 1
    with pytest.raises(LostPeerError, match=rf"^rank {rank.rank} .* for rank\(s\) {other}, here"):
        mailbox.check("here")
    return f"{type(mailbox.heap).__name__} {note}"


MISSING = {"missing": "nvshmem4py-cu13 is not installed"}
OTHERS = "PyTorch's symmetric memory"


@pytest.mark.parametrize(
    ("heap", "said", "found"),
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
def test_every_rank_takes_the_same_heap(ranks, heap, said, found):
    """Whichever rank, or whichever group of ranks, has the obstacle."""
    assert set(ranks(4).run(taken_case, heap, said)) == {found}


def test_triton_moves_rows_on_gpus():
    gpu_mailbox.check_gpu("triton")
    with pytest.raises(HeapError, match=r"parallel\.kernels = reference"):
        gpu_mailbox.check_gpu("reference")
