"""The mailboxes of ``rowwise`` on GPUs: in symmetric memory, which kernels store into."""

import torch
import torch.distributed as dist

from olmo_shard.config import ParallelConfig
from olmo_shard.dispatch.device_mailbox import DeviceMailbox
from olmo_shard.dispatch.heap import nvshmem
from olmo_shard.dispatch.heap.device import DeviceHeap
from olmo_shard.dispatch.heap.nvshmem import NvshmemHeap
from olmo_shard.dispatch.heap.torch_symmetric import TorchSymmetricHeap
from olmo_shard.dispatch.mailbox import MailboxLayout
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.host_memory import format_bytes
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import HeapError
from olmo_shard.kernels.backend import Backend
from olmo_shard.parallel.made_on_all import made_on_all


def check_gpu(backend: Backend) -> None:
    """:raises HeapError: where a run on GPUs cannot have such mailboxes, whatever the model."""
    if backend != "triton":
        raise HeapError(
            "rows on GPUs are moved by Triton kernels, and parallel.kernels = reference"
        )


def check_gpu_memory(layout: MailboxLayout, config: ParallelConfig) -> None:
    """What can be known of the memory of this machine's first GPU; nothing where it has none.

    :raises HeapError: where the mailboxes are larger than it, or NVSHMEM is asked for and missing.
    """
    if not torch.cuda.is_available():
        return
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    if layout.arena_bytes > total:
        raise HeapError(
            f"{layout.describe()}, and {device} has {format_bytes(total)}: lower "
            "train.micro_batch_tokens, or set parallel.capacity_factor"
        )
    problem = nvshmem.unsupported(device) if config.symmetric_heap == "nvshmem" else None
    if problem is not None:
        raise HeapError(problem)


def gpu_mailbox(
    mesh: Mesh, layout: MailboxLayout, config: ParallelConfig
) -> tuple[DeviceMailbox, str]:
    """This rank's, and what to say of it; collective.

    :raises HeapError: on all ranks, where one of them cannot have it.
    """
    heap, said = _heap(mesh, layout, config)
    global_ranks = dist.get_process_group_ranks(mesh.ep)
    mailbox = DeviceMailbox(heap, layout, mesh.timeout, global_ranks)
    # Nobody puts before its peers have read where everything is.
    gather_objects(None, mesh.control)
    return mailbox, said


def _heap(mesh: Mesh, layout: MailboxLayout, config: ParallelConfig) -> tuple[DeviceHeap, str]:
    """With ``auto`` NVSHMEM where it can be had, since it reaches other nodes, else PyTorch's."""
    said = "over PyTorch's symmetric memory"
    if config.symmetric_heap != "torch":
        problem = _first_problem(mesh)
        try:
            if problem is not None:
                raise HeapError(problem)
            return _make(NvshmemHeap, mesh, layout), "over NVSHMEM"
        except HeapError as error:
            if config.symmetric_heap == "nvshmem":
                raise
            said += f" (not NVSHMEM: {error})"
    return _make(TorchSymmetricHeap, mesh, layout), said


def _first_problem(mesh: Mesh) -> str | None:
    """Why a rank cannot use NVSHMEM; null if all can."""
    problems = gather_objects(nvshmem.unsupported(mesh.device), mesh.control)
    named = (f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None)
    return next(named, None)


def _make(
    heap: type[NvshmemHeap] | type[TorchSymmetricHeap], mesh: Mesh, layout: MailboxLayout
) -> DeviceHeap:
    torch.cuda.set_device(mesh.device)
    return made_on_all(
        mesh, lambda: heap(mesh.ep, mesh.device, layout.arena_bytes, layout.num_flags)
    )
