"""Rowwise dispatch on GPUs as a candidate, and the candidates for its symmetric memory."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from olmo_shard.config import ParallelConfig
from olmo_shard.dispatch.heap import nvshmem, torch_symmetric
from olmo_shard.dispatch.heap.nvshmem import NvshmemHeap
from olmo_shard.dispatch.heap.symmetric_heap import GpuHeap
from olmo_shard.dispatch.heap.torch_symmetric import TorchSymmetricHeap
from olmo_shard.dispatch.mailbox.mailbox_gpu import GpuMailbox
from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout
from olmo_shard.dispatch.rowwise.rowwise_gpu import RowwiseGpuTransport, most_pairs
from olmo_shard.dispatch.transport import Transport
from olmo_shard.distributed.agree import on_every_rank
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.host_memory import format_bytes
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import HeapError
from olmo_shard.parallel.create_on_every_rank import create_on_every_rank
from olmo_shard.parallel.transport_candidate import (
    DispatchRequest,
    TransportCandidate,
    max_tokens_problem,
)


class HeapCandidate(NamedTuple):
    """A kind of symmetric memory that a run on GPUs may use."""

    name: Literal["nvshmem", "torch"]
    """Value of ``parallel.symmetric_heap`` that selects the candidate."""
    label: str
    """Name for logs."""
    problem: Callable[[torch.device], str | None]
    """Why this rank cannot have the heap; ``None`` if nothing is missing. Allocates nothing."""
    create: Callable[[dist.ProcessGroup, torch.device, int, int], GpuHeap]
    """Creates a heap, given the group, the device, the bytes of an arena and the number of flags.
    Collective over the group."""


HEAPS = (
    HeapCandidate("nvshmem", "NVSHMEM", nvshmem.unsupported, NvshmemHeap),
    HeapCandidate(
        "torch", "PyTorch's symmetric memory", torch_symmetric.unsupported, TorchSymmetricHeap
    ),
)
"""In the order in which ``symmetric_heap: auto`` tries them. NVSHMEM reaches other nodes."""


class RowwiseOnGpu(TransportCandidate):
    """Rows are stored by kernels into mailboxes in symmetric memory."""

    name = "rowwise"

    def applies_to(self, request: DispatchRequest) -> bool:
        """See :meth:`TransportCandidate.applies_to`."""
        return request.device_type != "cpu"

    def problem(self, request: DispatchRequest, ranks_on_host: int | None = None) -> str | None:
        """See :meth:`TransportCandidate.problem`."""
        if request.backend != "triton":
            return "rows on GPUs are moved by Triton kernels, and parallel.kernels = reference"
        problem = max_tokens_problem(request)
        if problem is None and ranks_on_host is not None and torch.cuda.is_available():
            problem = _first_gpu_problem(request)
        return problem

    def describe(self, request: DispatchRequest, ranks_on_host: int) -> str:
        """See :meth:`TransportCandidate.describe`."""
        layout = request.mailbox_layout()
        return f"rowwise if the GPUs of a group reach each other: {layout.describe()}"

    def create(self, request: DispatchRequest, mesh: Mesh) -> tuple[Transport, str]:
        """See :meth:`TransportCandidate.create`."""
        layout, factor = request.mailbox_layout(), request.parallel.capacity_factor
        heap, note = create_heap(mesh, layout, request.parallel)
        global_ranks = dist.get_process_group_ranks(mesh.ep)
        mailbox = GpuMailbox(heap, layout, mesh.timeout, global_ranks)
        # A barrier: no rank puts before its peers have read all addresses.
        gather_objects(None, mesh.control)
        tokens = request.max_tokens
        assert tokens is not None
        max_pairs = most_pairs(layout, tokens, request.top_k, request.num_experts, factor)
        transport = RowwiseGpuTransport(mailbox, tokens, max_pairs)
        return transport, f"{layout.describe()}; {note}"


def create_heap(mesh: Mesh, layout: MailboxLayout, config: ParallelConfig) -> tuple[GpuHeap, str]:
    """Create the first kind of symmetric memory that all ranks can have; collective.

    :returns: the heap, and a note for the log.
    :raises HeapError: on all ranks, if none of the kinds that the config allows can be had.
    """
    wanted = config.symmetric_heap
    allowed = [candidate for candidate in HEAPS if wanted in ("auto", candidate.name)]
    passed_over = ""
    for candidate in allowed:
        try:
            _agree_on_problem(candidate, mesh)
            heap = _create(candidate, mesh, layout)
        except HeapError as error:
            # The last candidate's error is the user's: nothing else can be tried.
            if candidate is allowed[-1]:
                raise
            passed_over += f" (not {candidate.label}: {error})"
        else:
            return heap, f"over {candidate.label}{passed_over}"
    raise AssertionError(f"no candidate for parallel.symmetric_heap = {wanted}")


def _agree_on_problem(candidate: HeapCandidate, mesh: Mesh) -> None:
    """Collective.

    :raises HeapError: on all ranks, with the problem of the first rank that has one.
    """

    def raise_problem() -> None:
        """Raise the problem of this rank."""
        if problem := candidate.problem(mesh.device):
            raise HeapError(problem)

    on_every_rank(mesh.control, raise_problem)


def _create(candidate: HeapCandidate, mesh: Mesh, layout: MailboxLayout) -> GpuHeap:
    # Creating symmetric memory uses the current device.
    torch.cuda.set_device(mesh.device)
    sizes = layout.arena_bytes, layout.num_flags
    return create_on_every_rank(mesh, lambda: candidate.create(mesh.ep, mesh.device, *sizes))


def _first_gpu_problem(request: DispatchRequest) -> str | None:
    """What the first GPU of this machine shows before a run starts."""
    device, layout = torch.device("cuda", 0), request.mailbox_layout()
    total = torch.cuda.get_device_properties(device).total_memory
    if layout.arena_bytes > total:
        return (
            f"{layout.describe()}, and {device} has {format_bytes(total)}: lower "
            "train.micro_batch_tokens, or set parallel.capacity_factor"
        )
    # With auto another heap may be had; that is for the ranks to find out together.
    named = [heap for heap in HEAPS if heap.name == request.parallel.symmetric_heap]
    return named[0].problem(device) if named else None
