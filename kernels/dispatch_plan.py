"""The plan of a dispatch: which token rows go to which rank. Index arithmetic, no communication.

Shape letters: T tokens, K top-k, W ranks of the expert-parallel group, e local experts,
m = min(K, e) slots of a row, S rows that this rank sends (including those for itself).

A row's slots hold its routes. If K <= e, slot k holds the token's k-th route. Otherwise slot i
holds the route to local expert i. In both cases no two routes of a row share a slot, and no sort is
needed.

Example: W = 2, e = 2, K = 2, three tokens; -1 is a dropped route::

    topk_idx_TK = [[3, 0],    token 0: expert 3 (rank 1), expert 0 (rank 0)
                   [2, 3],    token 1: both on rank 1, so its row travels once
                   [-1, 1]]   token 2: expert 1 (rank 0)

    token_S         = [0,       2,       0,       1]         rows by (rank, token)
    send_counts     = [2,                2]
    send_routes     = [2,                3]
    local_expert_Sm = [[-1, 0], [-1, 1], [1, -1], [0, 1]]    as numbered on the destination rank
    row_WT          = [[0, -1, 1], [2, 3, -1]]
    slot_TK         = [[6, 3],    index into the flattened slots [1 + S, m]; row 0 collects the
                       [8, 9],    dropped routes
                       [0, 5]]

The kernels write lists of static length S_max = T x min(K, W), here 6; entries after S are -1. They
cut the tokens into chunks. The cell of rank d and chunk c has the number d x chunks + c, so the
number of rows before a cell is a sum over all cells with a lower number. The first launch counts
the rows of each cell, the second one writes the lists.

Bytes moved: reads 16 x T x K per rank (the experts twice; all but the first read hit the L2 cache),
writes 8 T K + 4 W T + (8 + 4 m) S_max.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.kernels.language import tl, triton

TOKENS = 128
"""Tokens per iteration of a program."""
CELLS = 2048
"""Largest number of cells (rank, chunk): each program of the second launch reads all counts."""


class PlanTensors(NamedTuple):
    """The plan as tensors. S is S_max if Triton made the plan, else the number of rows."""

    token_S: Tensor
    """int64 [S]: token of each row; rows are ordered by (destination rank, token)."""
    send_counts_W: Tensor
    """int64 [W]: number of rows for each rank."""
    send_routes_W: Tensor
    """int64 [W]: number of routes to the experts of each rank."""
    local_expert_Sm: Tensor
    """int32 [S, m]: expert of each slot, as numbered on the destination rank; -1 in empty slots."""
    row_WT: Tensor
    """int32 [W, T]: number of the token's row for each rank; -1 if no row goes to the rank."""
    slot_TK: Tensor
    """int64 [T, K]: slot of each route in the flattened [1 + S, m]. Row 0 collects the dropped
    routes, row 1 + s is row s."""


@triton.jit
def _routes_of(
    topk_idx_ptr, piece, num_tokens, TOP_K: tl.constexpr, K_PAD: tl.constexpr, TOKENS: tl.constexpr
):
    """Return the tokens, routes and experts of one piece of TOKENS tokens.

    Tokens are int64 [TOKENS], routes and experts int64 [TOKENS, K_PAD]. A route that does not exist
    has expert -2.
    """
    token = piece * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, K_PAD)
    route = token[:, None] * TOP_K + k[None, :]
    exists = (token < num_tokens)[:, None] & (k < TOP_K)[None, :]
    return token, route, tl.load(topk_idx_ptr + route, mask=exists, other=-2)


@triton.jit
def _count_kernel(
    topk_idx_ptr,
    rows_ptr,
    routes_ptr,
    num_tokens,
    num_local_experts,
    pieces,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    rank = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    first_expert = rank * num_local_experts
    rows = tl.zeros([TOKENS], tl.int32)
    routes = tl.zeros([TOKENS], tl.int32)
    for piece in range(pieces):
        _, _, expert = _routes_of(
            topk_idx_ptr, chunk * pieces + piece, num_tokens, TOP_K, K_PAD, TOKENS
        )
        here = (expert >= first_expert) & (expert < first_expert + num_local_experts)
        here_T = tl.sum(here.to(tl.int32), axis=1)
        rows += (here_T > 0).to(tl.int32)
        routes += here_T
    cell = rank * tl.num_programs(1) + chunk
    tl.store(rows_ptr + cell, tl.sum(rows, axis=0))
    tl.store(routes_ptr + cell, tl.sum(routes, axis=0))


@triton.jit
def _write_nothing(
    token_ptr,
    local_expert_ptr,
    first,
    step,
    max_rows,
    NUM_SLOTS: tl.constexpr,
    K_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write -1 to TOKENS rows at ``first``, at ``first + step``, and so on up to ``max_rows``."""
    k = tl.arange(0, K_PAD)[None, :]
    while first < max_rows:
        row = first + tl.arange(0, TOKENS)
        inside = row < max_rows
        tl.store(token_ptr + row, tl.full([TOKENS], -1, tl.int64), mask=inside)
        slots = row[:, None] * NUM_SLOTS + k
        nothing = tl.full([TOKENS, K_PAD], -1, tl.int32)
        tl.store(local_expert_ptr + slots, nothing, mask=inside[:, None] & (k < NUM_SLOTS))
        first += step


@triton.jit
def _write_kernel(
    topk_idx_ptr,
    rows_ptr,
    routes_ptr,
    token_ptr,
    send_counts_ptr,
    send_routes_ptr,
    local_expert_ptr,
    row_ptr,
    slot_ptr,
    num_tokens,
    max_rows,
    num_local_experts,
    pieces,
    TOP_K: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    K_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    CELLS: tl.constexpr,
):
    # Phase 1: the first row of this program's cell, from the counts of all cells before it.
    rank = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    num_chunks = tl.num_programs(1)
    num_cells = tl.num_programs(0).to(tl.int64) * num_chunks
    own_cell = rank * num_chunks + chunk
    cell = tl.arange(0, CELLS)
    rows = tl.load(rows_ptr + cell, mask=cell < num_cells, other=0)
    num_rows = tl.sum(rows, axis=0).to(tl.int64)
    next_row = tl.sum(tl.where(cell < own_cell, rows, 0), axis=0).to(tl.int64)
    if chunk == 0:
        of_rank = (cell >= own_cell) & (cell < own_cell + num_chunks)
        routes = tl.load(routes_ptr + cell, mask=of_rank, other=0)
        counted = tl.sum(tl.where(of_rank, rows, 0), axis=0)
        tl.store(send_counts_ptr + rank, counted.to(tl.int64))
        tl.store(send_routes_ptr + rank, tl.sum(routes, axis=0).to(tl.int64))

    # Phase 2: the rows of this cell's tokens, in token order, and the slots of their routes.
    first_expert = rank * num_local_experts
    k = tl.arange(0, K_PAD)[None, :]
    for piece in range(pieces):
        token, route, expert = _routes_of(
            topk_idx_ptr, chunk * pieces + piece, num_tokens, TOP_K, K_PAD, TOKENS
        )
        here = (expert >= first_expert) & (expert < first_expert + num_local_experts)
        local = tl.where(here, expert - first_expert, -1).to(tl.int32)
        is_sent = tl.max(here.to(tl.int32), axis=1)
        row = next_row + tl.cumsum(is_sent, axis=0) - 1
        next_row += tl.sum(is_sent, axis=0)
        is_sent = is_sent > 0
        row_or_none = tl.where(is_sent, row, -1).to(tl.int32)
        tl.store(row_ptr + (rank * num_tokens + token), row_or_none, mask=token < num_tokens)
        tl.store(token_ptr + row, token, mask=is_sent)
        if NUM_SLOTS == TOP_K:
            in_row = k
            slots = row[:, None] * NUM_SLOTS + k
            tl.store(local_expert_ptr + slots, local, mask=is_sent[:, None] & (k < NUM_SLOTS))
        else:
            in_row = local
            for slot in tl.static_range(NUM_SLOTS):
                # The number of the expert, or -1. At most one route of a token goes to an expert.
                filled = tl.max(tl.where(local == slot, slot, -1), axis=1)
                tl.store(local_expert_ptr + (row * NUM_SLOTS + slot), filled, mask=is_sent)
        tl.store(slot_ptr + route, (1 + row)[:, None] * NUM_SLOTS + in_row, mask=here)
        if rank == 0:
            # The bin: its slot k, or that of the last local expert, as in the reference.
            bin_slot = k if NUM_SLOTS == TOP_K else tl.full([1, K_PAD], NUM_SLOTS - 1, tl.int32)
            bin_slot = tl.broadcast_to(bin_slot, [TOKENS, K_PAD]).to(tl.int64)
            tl.store(slot_ptr + route, bin_slot, mask=expert == -1)

    first = num_rows + own_cell * TOKENS
    step = num_cells * TOKENS
    _write_nothing(token_ptr, local_expert_ptr, first, step, max_rows, NUM_SLOTS, K_PAD, TOKENS)


def _empty_plan(like: Tensor, num_ranks: int, num_local_experts: int) -> PlanTensors:
    num_tokens, top_k = like.shape
    num_slots, max_rows = min(top_k, num_local_experts), num_tokens * min(top_k, num_ranks)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=like.device)

    return PlanTensors(
        token_S=empty(max_rows, dtype=torch.int64),
        send_counts_W=empty(num_ranks, dtype=torch.int64),
        send_routes_W=empty(num_ranks, dtype=torch.int64),
        local_expert_Sm=empty(max_rows, num_slots, dtype=torch.int32),
        row_WT=empty(num_ranks, num_tokens, dtype=torch.int32),
        slot_TK=empty(num_tokens, top_k, dtype=torch.int64),
    )


@torch.library.custom_op("olmo_shard::dispatch_plan", mutates_args=())
def _plan_op(
    topk_idx_TK: Tensor, num_ranks: int, num_local_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, top_k = topk_idx_TK.shape
    assert num_ranks <= CELLS
    num_pieces = max(1, -(-num_tokens // TOKENS))
    pieces = -(-num_pieces // (CELLS // num_ranks))
    grid = (num_ranks, -(-num_pieces // pieces))

    plan = _empty_plan(topk_idx_TK, num_ranks, num_local_experts)
    max_rows, num_slots = plan.local_expert_Sm.shape
    device = topk_idx_TK.device
    rows, routes = (torch.empty(grid, dtype=torch.int32, device=device) for _ in range(2))
    k_pad = 1 << (top_k - 1).bit_length()
    topk_idx_TK = topk_idx_TK.contiguous()
    common = {"TOP_K": top_k, "K_PAD": k_pad, "TOKENS": TOKENS}
    _count_kernel[grid](topk_idx_TK, rows, routes, num_tokens, num_local_experts, pieces, **common)
    _write_kernel[grid](
        topk_idx_TK,
        rows,
        routes,
        *plan,
        num_tokens,
        max_rows,
        num_local_experts,
        pieces,
        **common,
        NUM_SLOTS=num_slots,
        CELLS=CELLS,
    )
    return tuple(plan)


@_plan_op.register_fake
def _(topk_idx_TK: Tensor, num_ranks: int, num_local_experts: int) -> PlanTensors:
    return _empty_plan(topk_idx_TK, num_ranks, num_local_experts)


def plan_triton(topk_idx_TK: Tensor, num_ranks: int, num_local_experts: int) -> PlanTensors:
    """Make the plan in two launches without synchronising; arguments as for :func:`plan_ref`."""
    return PlanTensors(*_plan_op(topk_idx_TK, num_ranks, num_local_experts))


def plan_ref(topk_idx_TK: Tensor, num_ranks: int, num_local_experts: int) -> PlanTensors:
    """Make the plan in plain torch, with lists as long as the number of rows.

    :param topk_idx_TK: int64 [T, K]: distinct global expert ids of each token; -1 for a dropped
        route.
    :param num_ranks: W. Rank d owns the experts d x e to (d + 1) x e - 1.
    :param num_local_experts: e.
    """
    num_tokens, top_k = topk_idx_TK.shape
    num_slots = min(top_k, num_local_experts)
    most = max((num_ranks + 1) * num_tokens, (1 + num_tokens * top_k) * num_slots)
    assert most < 2**31, "cells, rows and slots are counted in 32 bits"
    device = topk_idx_TK.device
    # Phase 1: the place of each route: 0 for a dropped route, d + 1 for a route to rank d.
    # On a CPU int32 takes a quarter of the time of int64, and a quotient in FP32 (exact below 2^24,
    # rounded down) a quarter of the time of an integer division. The divisor is a tensor, because
    # CUDA multiplies by the reciprocal of a Python number, and 41 x (1 / 41) is less than 1.
    shifted_TK = topk_idx_TK.to(torch.int32) + num_local_experts
    divisor = torch.full((), num_local_experts, dtype=torch.float32, device=device)
    place_TK = shifted_TK.float().div_(divisor).to(torch.int32)
    local_expert_TK = torch.sub(shifted_TK, place_TK, alpha=num_local_experts)

    # Phase 2: the row of each (place, token): mark the pairs that occur, then count up.
    token_T1 = torch.arange(num_tokens, dtype=torch.int32, device=device)[:, None]
    cell = torch.add(token_T1, place_TK, alpha=num_tokens).long().flatten()
    visited = torch.zeros((num_ranks + 1) * num_tokens, dtype=torch.bool, device=device)
    visited.index_fill_(0, cell, True)
    visited[:num_tokens] = False
    rows = visited.cumsum(0, dtype=torch.int32)
    row_TK = rows.index_select(0, cell).view(num_tokens, top_k)
    is_sent_WT = visited[num_tokens:].view(num_ranks, num_tokens)
    token_S = is_sent_WT.nonzero(as_tuple=True)[1]

    # Phase 3: the slot of each route, and the expert in each slot.
    by_route = top_k <= num_local_experts
    in_row = torch.arange(top_k, dtype=torch.int32, device=device) if by_route else local_expert_TK
    slot_TK = torch.add(in_row, row_TK, alpha=num_slots).long()
    experts = torch.full((1 + len(token_S), num_slots), -1, dtype=torch.int32, device=device)
    experts.view(-1).scatter_(0, slot_TK.flatten(), local_expert_TK.flatten())
    return PlanTensors(
        token_S=token_S,
        send_counts_W=is_sent_WT.sum(dim=1),
        send_routes_W=torch.bincount(place_TK.flatten(), minlength=num_ranks + 1)[1:],
        local_expert_Sm=experts[1:],
        row_WT=(rows * visited).sub_(1)[num_tokens:].view(num_ranks, num_tokens),
        slot_TK=slot_TK,
    )
