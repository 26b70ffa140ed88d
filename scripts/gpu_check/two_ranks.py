"""Part e of the GPU check: MoE layers with autograd on two ranks, two processes on one GPU.

This is the only part in which processes share symmetric memory, and in which a kernel waits for
another process. It measures no time, because the two processes share the GPU. PyTorch's symmetric
memory accepts two ranks on one GPU only if ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1`` is set;
``process.py`` sets it for this part.
"""

import multiprocessing
import queue
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.heap import nvshmem
from olmo_shard.dispatch.heap.nvshmem import NvshmemHeap
from olmo_shard.dispatch.heap.symmetric_heap import GpuHeap
from olmo_shard.dispatch.heap.torch_symmetric import TorchSymmetricHeap
from olmo_shard.dispatch.local import LocalTransport
from olmo_shard.dispatch.mailbox.mailbox_gpu import GpuMailbox
from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout
from olmo_shard.dispatch.rowwise.rowwise_gpu import RowwiseGpuTransport
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.errors import HeapError
from olmo_shard.kernels.backend import Backend
from scripts.gpu_check.compare import Setup, close
from scripts.gpu_check.inputs import Draw, Kind, Weights
from scripts.gpu_check.row import Check, Row

RANKS, TOKENS, EXPERTS, TOP_K, WIDTH, HIDDEN = 2, (7, 4), 6, 2, 64, 32
LAYOUT = MailboxLayout(
    num_ranks=RANKS,
    max_rows=max(TOKENS),
    num_slots=min(TOP_K, EXPERTS // RANKS),
    width=WIDTH,
    dtype=torch.float32,
)
KINDS: tuple[Kind, ...] = ("uniform", "skewed", "last")
WAIT = timedelta(seconds=50)
"""Time limit of a kernel that waits for the other rank, which may still compile its kernels."""
SECONDS = 60.0
"""Time limit for the next result of a rank, with the time for compiling."""
HEAPS: dict[str, Any] = {"torch": TorchSymmetricHeap, "nvshmem": NvshmemHeap}

Result = tuple[str, Any]
"""A rank's result: ``rows`` with the rows, ``unavailable`` with the reason why the heap cannot be
created, or ``failed`` with a traceback.
"""


def checks(setup: Setup) -> Iterator[Check]:
    """One check per symmetric heap."""
    for name in HEAPS:
        yield Check(f"two ranks, {name}", partial(check_heap, setup, name))


def check_heap(setup: Setup, name: str) -> list[Row]:
    """Run two ranks over one kind of heap, and return the rows of both.

    :raises RuntimeError: if a rank fails.
    """
    check = f"two ranks, {name}"
    if setup.tiny:
        return [Row(check, "skipped", note="needs a GPU")]
    if name == "nvshmem" and (problem := nvshmem.unsupported(setup.device)):
        return [Row(check, "skipped", note=problem)]
    results = run_pair(setup, name)
    for kind, value in results:
        if kind == "failed":
            raise RuntimeError(f"a rank failed:\n{value}")
    reasons = [value for kind, value in results if kind == "unavailable"]
    if reasons:
        return [Row(check, "skipped", note=reasons[0])]
    return [
        Row(*row)._replace(check=f"{check}, rank {rank}: {row[0]}")
        for rank, (_, rows) in enumerate(results)
        for row in rows
    ]


def run_pair(setup: Setup, name: str) -> list[Result]:
    """Start two ranks, and return their results; after a failure only those received so far.

    :raises TimeoutError: if a rank sends no result in time.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    messages = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, store.port, setup, name, messages), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    results: dict[int, Result] = {}
    try:
        while len(results) < RANKS:
            rank, kind, value = messages.get(timeout=SECONDS)
            results[rank] = kind, value
            if kind == "failed":  # the other rank may wait for this one for long
                return list(results.values())
    except queue.Empty:
        raise TimeoutError(f"rank(s) {set(range(RANKS)) - set(results)} did not answer") from None
    finally:
        for process in processes:
            process.join(0 if len(results) < RANKS else 10)
            process.kill()
    return [results[rank] for rank in range(RANKS)]


def _rank(rank: int, port: int, setup: Setup, name: str, messages: Any) -> None:
    try:
        torch.cuda.set_device(setup.device)
        store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS)
        )
        group = dist.group.WORLD
        assert group is not None
        rows = equality(setup, group, partial(HEAPS[name], group, setup.device))
        messages.put((rank, "rows", [tuple(row) for row in rows]))
        dist.destroy_process_group()
    except HeapError as error:
        messages.put((rank, "unavailable", str(error)))
    except Exception:  # noqa: BLE001  (becomes a failed row of the part)
        messages.put((rank, "failed", traceback.format_exc()))


def equality(
    setup: Setup,
    group: dist.ProcessGroup,
    make_heap: Callable[[int, int], GpuHeap],
    kinds: tuple[Kind, ...] = KINDS,
) -> list[Row]:
    """Compare layers on one heap with the dispatcher ``local``, forward and backward; collective.

    :param make_heap: creates a heap from its number of bytes and its number of flags.
    :param kinds: kinds of routing; there is one layer per kind.
    """
    heap = make_heap(LAYOUT.arena_bytes, LAYOUT.num_flags)
    transport = RowwiseGpuTransport(GpuMailbox(heap, LAYOUT, WAIT), max(TOKENS))
    there = TokenDispatcher(transport, EXPERTS, backend="triton")
    gather_objects(None, group)  # a rank must not put before every heap exists
    try:
        return [_layer(setup, group.rank(), there, kind) for kind in kinds]
    finally:
        there.close()


def _layer(setup: Setup, rank: int, there: TokenDispatcher, kind: Kind) -> Row:
    draw = Draw(setup, f"two ranks {kind}")
    whole = draw.experts(EXPERTS, WIDTH, HIDDEN, torch.float32)
    inputs = [_inputs(draw, kind, tokens) for tokens in TOKENS]
    local = EXPERTS // RANKS
    own = range(rank * local, (rank + 1) * local)
    weights, reference = whole.of(own).leaves(torch.float32), whole.leaves(torch.float32)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    results = _through(there, weights, inputs[rank], "triton")
    there.check()
    local_dispatcher = TokenDispatcher(LocalTransport(), EXPERTS)
    # The reference adds the experts' gradients of the tokens of both ranks.
    for other in range(RANKS):
        expected = _through(local_dispatcher, reference, inputs[other], "reference")
        if other == rank:
            both = zip(results, expected, strict=True)
            pairs |= dict(zip(("out", "dx", "router"), both, strict=True))
    gradients = [leaf.grad for leaf in weights], [leaf.grad for leaf in reference]
    for name, gradient, of_all in zip(("up", "down"), *gradients, strict=True):
        assert gradient is not None
        assert of_all is not None
        pairs[name] = gradient, of_all[own.start : own.stop]
    return close(kind, torch.float32, pairs)


def _inputs(draw: Draw, kind: Kind, tokens: int) -> tuple[Tensor, ...]:
    routing = draw.routing(kind, tokens, EXPERTS, TOP_K)
    return draw.normal(tokens, WIDTH), draw.normal(tokens, WIDTH), *routing


def _through(
    dispatcher: TokenDispatcher, weights: Weights, inputs: tuple[Tensor, ...], backend: Backend
) -> list[Tensor]:
    """Run a layer forward and backward; the gradients of the experts' weights add up.

    :returns: output, gradients of tokens and of router weights.
    """
    x, dout, idx, router = (each.clone() for each in inputs)
    x.requires_grad_()
    router.requires_grad_()
    pending = dispatcher.dispatch(x, idx, router)
    out = pending.run_experts(*weights, None, backend).wait()
    out.backward(dout)
    assert x.grad is not None
    assert router.grad is not None
    return [out.detach(), x.grad, router.grad]
