"""Which token rows go to which rank: index arithmetic alone, no communication.

Shape letters: T tokens, K top-k, W ranks of the expert-parallel group, e local experts,
m = min(K, e) slots of a row, S rows that this rank sends (its own included).

A row's slots hold its routes: slot k the token's k-th route where K <= e, else slot i the route to
local expert i. Either way no two routes of a row meet, and no sort is needed.

Example: W = 2, e = 2, K = 2, three tokens; -1 is a route that was dropped::

    topk_idx_TK = [[3, 0],    token 0: expert 3 (rank 1), expert 0 (rank 0)
                   [2, 3],    token 1: both on rank 1, so its row travels once
                   [-1, 1]]   token 2: expert 1 (rank 0)

    token_S         = [0,       2,       0,       1]         rows by (rank, token)
    send_counts     = [2,                2]
    send_routes     = [2,                3]
    local_expert_Sm = [[-1, 0], [-1, 1], [1, -1], [0, 1]]    as numbered on the destination rank
    row_WT          = [[0, -1, 1], [2, 3, -1]]
    slot_TK         = [[6, 3],    index into the slots of [1 + S, m]; row 0 is the bin of the
                       [8, 9],    routes that were dropped
                       [0, 5]]

The kernels write lists of static length S_max = T x min(K, W), here 6; rows past S are -1. They cut
the tokens into C chunks, and rank d's cell of chunk c is number d x C + c: the rows before a cell
are a sum over all cells of a lower number.

Bytes moved: reads 16 x T x K for each rank (twice the experts, from the L2 cache but once), writes
8 T K + 4 W T + (8 + 4 m) S_max.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.kernels.language import tl, triton

TOKENS = 128
"""That a program holds at a time."""
CELLS = 2048
"""Cells of (rank, chunk) at most: each program of the second launch reads the rows of all."""


class PlanTensors(NamedTuple):
    """S is S_max where the kernels wrote them, else the number of rows."""

    token_S: Tensor
    """int64 [S]: token of each row, ordered by (destination rank, token)."""
    send_counts_W: Tensor
    """int64 [W]: rows for each rank."""
    send_routes_W: Tensor
    """int64 [W]: routes to the experts of each rank."""
    local_expert_Sm: Tensor
    """int32 [S, m]: the routes' experts as numbered on the destination rank; -1 in empty slots."""
    row_WT: Tensor
    """int32 [W, T]: the token's row among the S, -1 where none goes to the rank."""
    slot_TK: Tensor
    """int64 [T, K]: slot of each route in the flattened [1 + S, m]; row 0 is a bin for dropped
    routes, row 1 + s is row s."""


@triton.jit
def _routes_of(
    topk_idx_ptr, piece, num_tokens, TOP_K: tl.constexpr, K_PAD: tl.constexpr, TOKENS: tl.constexpr
):
    """Of one piece of the tokens: tokens int64 [TOKENS], routes and experts int64 [TOKENS, K_PAD];
    a route that does not exist has expert -2.
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
        expert = _routes_of(topk_idx_ptr, chunk * pieces + piece, num_tokens, TOP_K, K_PAD, TOKENS)[
            2
        ]
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
    """-1 into the rows from ``first`` on, TOKENS in every ``step``."""
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

    first_expert = rank * num_local_experts
    k = tl.arange(0, K_PAD)[None, :]
    for piece in range(pieces):
        token, route, expert = _routes_of(
            topk_idx_ptr, chunk * pieces + piece, num_tokens, TOP_K, K_PAD, TOKENS
        )
        here = (expert >= first_expert) & (expert < first_expert + num_local_experts)
        local = tl.where(here, expert - first_expert, -1).to(tl.int32)
        goes = tl.max(here.to(tl.int32), axis=1)
        row = next_row + tl.cumsum(goes, axis=0) - 1
        next_row += tl.sum(goes, axis=0)
        goes = goes > 0
        row_or_none = tl.where(goes, row, -1).to(tl.int32)
        tl.store(row_ptr + (rank * num_tokens + token), row_or_none, mask=token < num_tokens)
        tl.store(token_ptr + row, token, mask=goes)
        if NUM_SLOTS == TOP_K:
            in_row = k
            slots = row[:, None] * NUM_SLOTS + k
            tl.store(local_expert_ptr + slots, local, mask=goes[:, None] & (k < NUM_SLOTS))
        else:
            in_row = local
            for slot in tl.static_range(NUM_SLOTS):
                # The expert, or -1: at most one route of a token goes to it.
                filled = tl.max(tl.where(local == slot, slot, -1), axis=1)
                tl.store(local_expert_ptr + (row * NUM_SLOTS + slot), filled, mask=goes)
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
    """Two launches, no synchronization; arguments as for :func:`plan_ref`."""
    return PlanTensors(*_plan_op(topk_idx_TK, num_ranks, num_local_experts))


def plan_ref(topk_idx_TK: Tensor, num_ranks: int, num_local_experts: int) -> PlanTensors:
    """The same in plain torch, with lists as long as there are rows.

    :param topk_idx_TK: int64 [T, K], distinct global expert ids of each token; -1 where a route was
        dropped.
    :param num_ranks: W; rank d holds the experts d x e to (d + 1) x e - 1.
    :param num_local_experts: e.
    """
    num_tokens, top_k = topk_idx_TK.shape
    num_slots = min(top_k, num_local_experts)
    most = max((num_ranks + 1) * num_tokens, (1 + num_tokens * top_k) * num_slots)
    assert most < 2**31, "cells, rows and slots are counted in 32 bits"
    device = topk_idx_TK.device
    # int32 takes a quarter of the time of int64 on a CPU, and a quotient in FP32 (exact below 2^24,
    # rounded down) a quarter of that of an integer division. The divisor is a tensor, since CUDA
    # multiplies by the reciprocal of a number: 41 x (1 / 41) is less than 1. Dropped routes go to
    # place 0, rank d's to place d + 1.
    shifted_TK = topk_idx_TK.to(torch.int32) + num_local_experts
    divisor = torch.full((), num_local_experts, dtype=torch.float32, device=device)
    place_TK = shifted_TK.float().div_(divisor).to(torch.int32)
    local_expert_TK = torch.sub(shifted_TK, place_TK, alpha=num_local_experts)

    # A cell is a (place, token).
    token_T1 = torch.arange(num_tokens, dtype=torch.int32, device=device)[:, None]
    cell = torch.add(token_T1, place_TK, alpha=num_tokens).long().flatten()
    visited = torch.zeros((num_ranks + 1) * num_tokens, dtype=torch.bool, device=device)
    visited.index_fill_(0, cell, True)
    visited[:num_tokens] = False
    rows = visited.cumsum(0, dtype=torch.int32)
    row_TK = rows.index_select(0, cell).view(num_tokens, top_k)
    goes_WT = visited[num_tokens:].view(num_ranks, num_tokens)
    token_S = goes_WT.nonzero(as_tuple=True)[1]

    by_route = top_k <= num_local_experts
    in_row = torch.arange(top_k, dtype=torch.int32, device=device) if by_route else local_expert_TK
    slot_TK = torch.add(in_row, row_TK, alpha=num_slots).long()
    experts = torch.full((1 + len(token_S), num_slots), -1, dtype=torch.int32, device=device)
    experts.view(-1).scatter_(0, slot_TK.flatten(), local_expert_TK.flatten())
    return PlanTensors(
        token_S=token_S,
        send_counts_W=goes_WT.sum(dim=1),
        send_routes_W=torch.bincount(place_TK.flatten(), minlength=num_ranks + 1)[1:],
        local_expert_Sm=experts[1:],
        row_WT=(rows * visited).sub_(1)[num_tokens:].view(num_ranks, num_tokens),
        slot_TK=slot_TK,
    )
