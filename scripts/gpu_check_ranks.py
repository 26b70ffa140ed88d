"""Part e of the GPU check: two ranks, two processes, one GPU; whole MoE layers with autograd.

The one part in which symmetric memory is really shared between processes, and a kernel really
waits for another process. Correctness alone: the processes take turns on the GPU, so times mean
nothing. PyTorch's symmetric memory accepts two ranks on a GPU only where
``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1`` is set, which ``gpu_check.py`` does for this part.
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
from gpu_check_inputs import Draw, Kind, Weights
from gpu_check_report import Setup, close
from gpu_check_row import Check, Row
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
"""Of a kernel for the other process, which compiles kernels of its own, too, and takes turns."""
SECONDS = 60.0
"""Between two answers of ranks, compiles included."""
HEAPS: dict[str, Any] = {"torch": TorchSymmetricHeap, "nvshmem": NvshmemHeap}

Found = tuple[str, Any]
"""``rows``, ``refused`` with a reason, or ``failed`` with a traceback."""


def checks(setup: Setup) -> Iterator[Check]:
    for name in HEAPS:
        yield Check(f"two ranks, {name}", partial(check_heap, setup, name))


def check_heap(setup: Setup, name: str) -> list[Row]:
    check = f"two ranks, {name}"
    if setup.tiny:
        return [Row(check, "skipped", note="needs a GPU")]
    if name == "nvshmem" and (problem := nvshmem.unsupported(setup.device)):
        return [Row(check, "skipped", note=problem)]
    found = run_pair(setup, name)
    for kind, what in found:
        if kind == "failed":
            raise RuntimeError(f"a rank failed:\n{what}")
    refused = [what for kind, what in found if kind == "refused"]
    if refused:
        return [Row(check, "skipped", note=refused[0])]
    return [
        Row(*row)._replace(check=f"{check}, rank {rank}: {row[0]}")
        for rank, (_, rows) in enumerate(found)
        for row in rows
    ]


def run_pair(setup: Setup, name: str) -> list[Found]:
    """What each rank found.

    :raises TimeoutError: where a rank ends without a word, or does not end.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, store.port, setup, name, results), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    found: dict[int, Found] = {}
    try:
        while len(found) < RANKS:
            rank, kind, what = results.get(timeout=SECONDS)
            found[rank] = kind, what
            if kind == "failed":  # the other one waits for it, maybe for long
                return list(found.values())
    except queue.Empty:
        raise TimeoutError(f"rank(s) {set(range(RANKS)) - set(found)} did not answer") from None
    finally:
        for process in processes:
            process.join(0 if len(found) < RANKS else 10)
            process.kill()
    return [found[rank] for rank in range(RANKS)]


def _rank(rank: int, port: int, setup: Setup, name: str, results: Any) -> None:
    try:
        torch.cuda.set_device(setup.device)
        store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS)
        )
        group = dist.group.WORLD
        assert group is not None
        rows = equality(setup, group, partial(HEAPS[name], group, setup.device))
        results.put((rank, "rows", [tuple(row) for row in rows]))
        dist.destroy_process_group()
    except HeapError as error:
        results.put((rank, "refused", str(error)))
    except Exception:  # noqa: BLE001  (the part prints it, and goes on)
        results.put((rank, "failed", traceback.format_exc()))


def equality(
    setup: Setup,
    group: dist.ProcessGroup,
    make_heap: Callable[[int, int], GpuHeap],
    kinds: tuple[Kind, ...] = KINDS,
) -> list[Row]:
    """Several layers on one heap, forward and backward, against ``local``; collective.

    :param make_heap: of so many bytes and flags.
    :param kinds: of routing, a layer each.
    """
    heap = make_heap(LAYOUT.arena_bytes, LAYOUT.num_flags)
    transport = RowwiseGpuTransport(GpuMailbox(heap, LAYOUT, WAIT), max(TOKENS))
    there = TokenDispatcher(transport, EXPERTS, backend="triton")
    gather_objects(None, group)  # nobody puts before all have made theirs
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
    mine, reference = whole.of(own).leaves(torch.float32), whole.leaves(torch.float32)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    found = _through(there, mine, inputs[rank], "triton")
    there.check()
    local_dispatcher = TokenDispatcher(LocalTransport(), EXPERTS)
    for other in range(RANKS):
        expected = _through(local_dispatcher, reference, inputs[other], "reference")
        if other == rank:
            names = ("out", "dx", "router")
            both = zip(found, expected, strict=True)
            pairs |= dict(zip(names, both, strict=True))
    gradients = [each.grad for each in mine], [each.grad for each in reference]
    for name, one, all_of_them in zip(("up", "down"), *gradients, strict=True):
        assert one is not None
        assert all_of_them is not None
        pairs[name] = one, all_of_them[own.start : own.stop]
    return close(kind, torch.float32, pairs)


def _inputs(draw: Draw, kind: Kind, tokens: int) -> tuple[Tensor, ...]:
    routing = draw.routing(kind, tokens, EXPERTS, TOP_K)
    return draw.normal(tokens, WIDTH), draw.normal(tokens, WIDTH), *routing


def _through(
    dispatcher: TokenDispatcher, weights: Weights, inputs: tuple[Tensor, ...], backend: Backend
) -> list[Tensor]:
    """Output, gradients of tokens and of router weights; the experts' gradients add up."""
    x, dout, idx, router = (each.clone() for each in inputs)
    x.requires_grad_()
    router.requires_grad_()
    pending = dispatcher.dispatch(x, idx, router)
    out = pending.run_experts(*weights, None, backend).wait()
    out.backward(dout)
    assert x.grad is not None
    assert router.grad is not None
    return [out.detach(), x.grad, router.grad]
