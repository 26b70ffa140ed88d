"""Part c of the GPU check, second half: kernels that move rows, and AdamW, compared with a copy.

Bytes are those that a kernel must read and write, as for the copy. Virtual ranks share the memory
of one GPU, so the rates are those of that memory, not of NVLink. A row that goes to several ranks
counts as one read per rank, although the cache may serve it.

Shape letters: T tokens, D model width, P pairs (row, local expert), R received rows, S sent rows,
m slots for local experts per row, W ranks.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout
from olmo_shard.kernels.copy_received_rows import copy_received_rows
from olmo_shard.kernels.dispatch_plan import PlanTensors, plan_triton
from olmo_shard.kernels.expert_layout import expert_layout_triton
from olmo_shard.kernels.fused_adamw import AdamWRates, AdamWTensors, adamw_triton, pack_scalars
from olmo_shard.kernels.put_rows import put_rows
from olmo_shard.kernels.reduce_and_put import reduce_and_put
from olmo_shard.kernels.route_capacity import capacity_triton
from olmo_shard.kernels.row_moves import RowList
from olmo_shard.kernels.sum_rows import sum_rows
from scripts.gpu_check.compare import Setup, measurement
from scripts.gpu_check.inputs import Draw, Kind
from scripts.gpu_check.row import Row
from scripts.gpu_check.timing import medians, stated_bandwidth
from scripts.gpu_check.variants import BF16, copying
from scripts.gpu_check.virtual_heap import VirtualHeap, virtual_heaps

PUSH, ADAMW = 0.80, 0.85
"""Targets: shares of the rate of a copy."""


class Sizes(NamedTuple):
    """Sizes of the exchange, and of the optimizer's slice."""

    ranks: int
    tokens: int
    """Tokens per rank."""
    width: int
    experts: int
    top_k: int
    elements: int
    """Elements that AdamW updates."""


# The tokens of a rank take 67 MB, more than the L2 cache; all mailboxes take 7.6 GB.
FULL = Sizes(8, 16384, 2048, 64, 8, 1 << 28)
TINY = Sizes(4, 2, 16, 8, 2, 1025)


class Moves(NamedTuple):
    """Rank 0 of an exchange: its mailbox, its plan, and the rows that it receives."""

    heap: VirtualHeap
    layout: MailboxLayout
    plan: PlanTensors
    counts_W: Tensor
    """Rows that rank 0 receives from each rank."""
    pair_Rm: Tensor
    num_pairs: int


def _moves(setup: Setup, sizes: Sizes, kind: Kind) -> Moves:
    local = sizes.experts // sizes.ranks
    layout = MailboxLayout(
        num_ranks=sizes.ranks,
        max_rows=sizes.tokens,
        num_slots=min(sizes.top_k, local),
        width=sizes.width,
        dtype=BF16,
    )
    draw = Draw(setup, f"moves {kind}")
    plans = []
    for _ in range(sizes.ranks):
        idx, _ = draw.routing(kind, sizes.tokens, sizes.experts, sizes.top_k)
        plans.append(plan_triton(idx, sizes.ranks, local))
    counts = [int(plan.send_counts_W[0]) for plan in plans]
    # Rows are sorted by destination, so those for rank 0 come first in the plan of every rank.
    pairs = zip(plans, counts, strict=True)
    experts_Rm = torch.cat([plan.local_expert_Sm[:count] for plan, count in pairs])
    num_pairs = int((experts_Rm >= 0).sum())
    pair_Rm = expert_layout_triton(experts_Rm, local, num_pairs).pair_Rm
    heap = virtual_heaps(layout, setup.device)[0]
    counts_W = torch.tensor(counts, device=setup.device)
    return Moves(heap, layout, plans[0], counts_W, pair_Rm, num_pairs)


def check_moves(setup: Setup, kind: Kind) -> Iterator[Row]:
    """Rates of the kernels that send, receive and sum rows.

    :param kind: kind of routing; only ``uniform`` has a target.
    """
    # Operands of rank 0.
    sizes = TINY if setup.tiny else FULL
    heap, layout, plan, counts_W, pair_Rm, num_pairs = _moves(setup, sizes, kind)
    draw, regions = Draw(setup, "rows"), layout.regions(0)
    epoch = torch.zeros(1, dtype=torch.int64, device=setup.device)
    x_TD = draw.normal(sizes.tokens, sizes.width, dtype=BF16)
    received = int(counts_W.sum())
    y_PD = x_TD.repeat(-(-num_pairs // sizes.tokens), 1)[:num_pairs].contiguous()
    own_TD = torch.zeros_like(x_TD)
    weights_Sm = torch.ones(plan.local_expert_Sm.shape, device=setup.device)
    sent = RowList(
        plan.send_counts_W, plan.token_S, plan.send_routes_W, weights_Sm, plan.local_expert_Sm
    )
    targets, arena = heap.arena_ptrs, heap.arena

    variants: dict[str, Callable[[], object]] = {
        "put_rows": lambda: put_rows(x_TD, sent, targets, epoch, regions, len(plan.token_S)),
        "copy_received_rows": lambda: copy_received_rows(
            x_TD, sent, counts_W, arena, epoch, regions, received
        ),
        "reduce_and_put": lambda: reduce_and_put(
            y_PD, pair_Rm, counts_W, None, targets, epoch, regions, own_TD
        ),
        "sum_rows": lambda: sum_rows(
            own_TD, plan.send_counts_W, plan.row_WT, arena, epoch, regions
        ),
    }
    # Bytes of rows in bf16, of metadata (8 per slot: weight and expert), of int32 indices (4).
    row, slots, ranks = 2 * sizes.width, layout.num_slots, sizes.ranks
    sent_rows = int(plan.send_counts_W.sum())
    to_others = sent_rows - int(plan.send_counts_W[0])
    num_bytes = {
        "put_rows": to_others * 2 * (row + 8 * slots),
        "copy_received_rows": received * 2 * (row + 8 * slots),
        "reduce_and_put": num_pairs * row + received * (row + 4 * slots),
        "sum_rows": sent_rows * row + sizes.tokens * (row + 4 * ranks),
    }
    notes = {"put_rows": "memory of one GPU, not NVLink"}
    targets_of = {"put_rows": PUSH} if kind == "uniform" else {}
    yield from _rows(setup, variants, num_bytes, targets_of, notes, f", {kind}")


def check_routing(setup: Setup) -> Iterator[Row]:
    """Microseconds of the kernels that plan an exchange and order the pairs of the experts."""
    sizes = TINY if setup.tiny else FULL
    local = sizes.experts // sizes.ranks
    idx, weights = Draw(setup, "routing").routing(
        "uniform", sizes.tokens, sizes.experts, sizes.top_k
    )
    labelled = torch.ones(sizes.tokens, dtype=torch.bool, device=setup.device)
    local_plan = plan_triton(idx, 1, sizes.experts)
    variants: dict[str, Callable[[], object]] = {
        "plan": lambda: plan_triton(idx, sizes.ranks, local),
        "capacity": lambda: capacity_triton(idx, weights, labelled, sizes.experts, 1.25),
        "expert_layout": lambda: expert_layout_triton(
            local_plan.local_expert_Sm, sizes.experts, idx.numel()
        ),
    }
    for name, seconds in medians(setup, variants).items():
        yield measurement(setup, name, "us", 1e6 * seconds, None, note=f"{sizes.tokens} tokens")


def check_adamw(setup: Setup) -> Iterator[Row]:
    """Rate of AdamW: 30 bytes per element with bf16 model weights."""
    numel = (TINY if setup.tiny else FULL).elements
    main, grad, exp_avg = (torch.zeros(numel, device=setup.device) for _ in range(3))
    tensors = AdamWTensors(main, grad, exp_avg, torch.zeros_like(main), main.to(BF16))
    one = torch.ones((), device=setup.device)
    scalars = pack_scalars(one, torch.zeros_like(one), one, 0.9, 0.95)
    rates = AdamWRates(1e-3, 0.1, 0.9, 0.95, 1e-8)
    variants: dict[str, Callable[[], object]] = {
        "adamw": lambda: adamw_triton(tensors, scalars, rates),
    }
    yield from _rows(setup, variants, {"adamw": 30 * numel}, {"adamw": ADAMW}, {})


def _rows(
    setup: Setup,
    variants: dict[str, Callable[[], object]],
    num_bytes: dict[str, int],
    targets: dict[str, float],
    notes: dict[str, str],
    suffix: str = "",
) -> Iterator[Row]:
    num_copied, copy = copying(setup)
    times, stated = medians(setup, variants | {"copy": copy}), stated_bandwidth(setup)
    ceiling = num_copied / times["copy"] / 1e9
    yield measurement(
        setup,
        f"copy, beside {', '.join(num_bytes)}{suffix}",
        "GB/s",
        ceiling,
        stated and stated / 1e9,
    )
    for name, count in num_bytes.items():
        rate, share = count / times[name] / 1e9, targets.get(name)
        target = None if share is None else share * ceiling
        note = "; ".join(filter(None, [f"{rate / ceiling:.0%} of the copy", notes.get(name)]))
        yield measurement(setup, name + suffix, "GB/s", rate, ceiling, target, note=note)
