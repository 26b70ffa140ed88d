"""Which routes an expert takes when each may take only so many: decided at the source.

Shape letters: T tokens, K top-k, E experts. T' counts the tokens that have a label, so that padding
changes nothing.

An expert takes at most ceil(capacity_factor x T' x K / E) routes of a rank's micro-batch. Of more,
those with the highest weights stay, ties by token order; tokens without a label yield to those that
have one. A NaN counts as the highest weight.

Example: E = 2, K = 1, factor 1, four tokens of which the last has no label, so that an expert takes
ceil(1 x 3 x 1 / 2) = 2 routes::

    topk_idx_TK     = [[0], [0], [0], [0]]
    topk_weights_TK = [[0.5], [0.7], [0.5], [0.9]]
    kept            = [[0], [0], [-1], [-1]]    0.7, then the first 0.5; 0.9 has no label

The kernel has one program an expert. It copies the expert's routes, in order, into a list of its
own: the route and a key of 33 bits (label, then the weight's bits in an order that integers have).
A pass over the keys for every 9 bits finds the last key that stays.

Bytes moved: reads 16 x T x K for each expert (twice the ids, from the L2 cache but once), and for
each route 5 more; writes and reads a list of 12 a route (the keys up to 5 times); writes 8 a route.
"""

import math

import torch
from torch import Tensor

from olmo_shard.kernels.backend import Backend
from olmo_shard.kernels.language import tl, triton

ROUNDING = 1e-9
"""Taken off before rounding up: 1.1 x 10 is 11 and not, by rounding, 12."""
ROUTES = 1024
"""That a program holds at a time."""
WARPS = 8
"""Twice the routes, or half the warps, would take 255 registers of a thread instead of 126."""
DIGIT_BITS = 9
DIGITS = 4
"""Together at least the 33 bits of a key. Three digits of 11 bits would take 255 registers."""


@triton.jit
def _ordered(weight):
    """int64 of 32 bits in the order of FP32 weights: -0.0 equal to 0.0, every NaN the highest."""
    bits = weight.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    size = bits & 0x7FFFFFFF
    ordered = tl.where(bits == size, 0x80000000 + size, 0x80000000 - size)
    return tl.where(size > 0x7F800000, 0xFFFFFFFF, ordered)


@triton.jit
def _limit(
    labelled_ptr,
    num_tokens,
    FACTOR: tl.constexpr,
    TOP_K: tl.constexpr,
    ROUNDING: tl.constexpr,
    ROUTES: tl.constexpr,
):
    """Routes that an expert takes, by the same operations in FP64 as the reference."""
    token = tl.arange(0, ROUTES).to(tl.int64)
    labelled = tl.zeros([ROUTES], tl.int32)
    for _ in range(tl.cdiv(num_tokens, ROUTES)):
        found = tl.load(labelled_ptr + token, mask=token < num_tokens, other=0)
        labelled += (found != 0).to(tl.int32)
        token += ROUTES
    # A number as an argument, and not as a constant, would come in FP32.
    exact = tl.sum(labelled, axis=0).to(tl.float64) * tl.full([], FACTOR, tl.float64)
    exact = exact * TOP_K / tl.num_programs(0).to(tl.float64)
    most = tl.full([], num_tokens, tl.float64)
    return tl.minimum(tl.ceil(exact - tl.full([], ROUNDING, tl.float64)), most).to(tl.int32)


@triton.jit
def _last_key(
    key_ptr, num_keys, limit, BITS: tl.constexpr, DIGITS: tl.constexpr, ROUTES: tl.constexpr
):
    """The highest key that no more than ``limit`` keys exceed, and how many keys equal to it make
    the limit full.
    """
    digit = tl.arange(0, 1 << BITS)
    known = tl.zeros([], tl.int64)  # the key's bits, from above
    room = limit
    for place in tl.static_range(DIGITS):
        shift = BITS * (DIGITS - 1 - place)
        counts = tl.zeros([1 << BITS], tl.int32)
        index = tl.arange(0, ROUTES).to(tl.int64)
        for _ in range(tl.cdiv(num_keys, ROUTES)):
            key = tl.load(key_ptr + index, mask=index < num_keys, other=0)
            alike = (index < num_keys) & ((key >> (shift + BITS)) == known)
            bits = ((key >> shift) & ((1 << BITS) - 1)).to(tl.int32)
            counts += tl.histogram(bits, 1 << BITS, mask=alike)
            index += ROUTES
        at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        # Never fewer than 1: all keys that are alike are at least ``room``.
        chosen = tl.sum((at_least >= room).to(tl.int32), axis=0) - 1
        room -= tl.sum(tl.where(digit > chosen, counts, 0), axis=0)
        known = (known << BITS) + chosen
    return known, room


@triton.jit
def _capacity_kernel(
    topk_idx_ptr,
    weights_ptr,
    labelled_ptr,
    key_ptr,
    route_ptr,
    kept_ptr,
    num_tokens,
    num_routes,
    FACTOR: tl.constexpr,
    TOP_K: tl.constexpr,
    ROUNDING: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    DIGITS: tl.constexpr,
    ROUTES: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    limit = _limit(labelled_ptr, num_tokens, FACTOR, TOP_K, ROUNDING, ROUTES)

    # Where the expert's list starts, behind those of lower experts, and how long it is.
    lower = tl.zeros([ROUTES], tl.int32)
    here = tl.zeros([ROUTES], tl.int32)
    route = tl.arange(0, ROUTES).to(tl.int64)
    for _ in range(tl.cdiv(num_routes, ROUTES)):
        found = tl.load(topk_idx_ptr + route, mask=route < num_routes, other=-1)
        lower += ((found >= 0) & (found < expert)).to(tl.int32)
        here += (found == expert).to(tl.int32)
        route += ROUTES
    first = tl.sum(lower, axis=0).to(tl.int64)
    num_keys = tl.sum(here, axis=0)
    key_ptr += first
    route_ptr += first

    end = tl.zeros([], tl.int64)
    route = tl.arange(0, ROUTES).to(tl.int64)
    for _ in range(tl.cdiv(num_routes, ROUTES)):
        found = tl.load(topk_idx_ptr + route, mask=route < num_routes, other=-2)
        mine = found == expert
        weight = tl.load(weights_ptr + route, mask=mine, other=0.0)
        labelled = tl.load(labelled_ptr + route // TOP_K, mask=mine, other=0)
        key = _ordered(weight) + ((labelled != 0).to(tl.int64) << 32)
        index = end + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(key_ptr + index, key, mask=mine)
        tl.store(route_ptr + index, route.to(tl.int32), mask=mine)
        if expert == 0:
            tl.store(kept_ptr + route, tl.full([ROUTES], -1, tl.int64), mask=found == -1)
        end += tl.sum(mine.to(tl.int32), axis=0)
        route += ROUTES
    tl.debug_barrier()  # other threads read what these wrote

    last_key = tl.full([], -1, tl.int64)
    room = limit
    if num_keys > limit:
        last_key, room = _last_key(key_ptr, num_keys, limit, DIGIT_BITS, DIGITS, ROUTES)

    index = tl.arange(0, ROUTES).to(tl.int64)
    for _ in range(tl.cdiv(num_keys, ROUTES)):
        there = index < num_keys
        key = tl.load(key_ptr + index, mask=there, other=-2)
        route = tl.load(route_ptr + index, mask=there, other=0).to(tl.int64)
        equal = (key == last_key).to(tl.int32)
        stays = (key > last_key) | ((equal > 0) & (tl.cumsum(equal, axis=0) <= room))
        tl.store(kept_ptr + route, tl.where(stays, expert, -1), mask=there)
        room -= tl.sum(equal, axis=0)
        index += ROUTES


@torch.library.custom_op("olmo_shard::keep_within_capacity", mutates_args=())
def _capacity_op(
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    labelled_T: Tensor,
    num_experts: int,
    capacity_factor: float,
) -> Tensor:
    num_tokens, top_k = topk_idx_TK.shape
    num_routes = num_tokens * top_k
    assert num_routes < 2**31 - ROUTES, "routes are stored in 32 bits"
    assert topk_weights_TK.dtype == torch.float32
    device = topk_idx_TK.device
    kept_TK = torch.empty((num_tokens, top_k), dtype=torch.int64, device=device)
    _capacity_kernel[(num_experts,)](
        topk_idx_TK.contiguous(),
        topk_weights_TK.contiguous(),
        labelled_T.contiguous().view(torch.uint8),
        torch.empty((num_routes,), dtype=torch.int64, device=device),
        torch.empty((num_routes,), dtype=torch.int32, device=device),
        kept_TK,
        num_tokens,
        num_routes,
        FACTOR=float(capacity_factor),
        TOP_K=top_k,
        ROUNDING=ROUNDING,
        DIGIT_BITS=DIGIT_BITS,
        DIGITS=DIGITS,
        ROUTES=ROUTES,
        num_warps=WARPS,
    )
    return kept_TK


@_capacity_op.register_fake
def _(topk_idx_TK: Tensor, *_: object) -> Tensor:
    return torch.empty(topk_idx_TK.shape, dtype=torch.int64, device=topk_idx_TK.device)


def capacity_triton(
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    labelled_T: Tensor,
    num_experts: int,
    capacity_factor: float,
) -> Tensor:
    """One launch, no synchronization; arguments as for :func:`capacity_ref`, weights in FP32."""
    weights_TK = topk_weights_TK.detach()
    return _capacity_op(topk_idx_TK, weights_TK, labelled_T, num_experts, capacity_factor)


def capacity_ref(
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    labelled_T: Tensor,
    num_experts: int,
    capacity_factor: float,
) -> Tensor:
    """The same in plain torch, by sorting."""
    num_tokens, top_k = topk_idx_TK.shape
    expert_R = topk_idx_TK.flatten()
    unlabelled_R = ~labelled_T[:, None].expand(num_tokens, top_k).flatten()
    # Stable sorts, the least important key first.
    order = torch.argsort(topk_weights_TK.detach().flatten(), descending=True, stable=True)
    order = order[torch.argsort(unlabelled_R[order].to(torch.uint8), stable=True)]
    order = order[torch.argsort(expert_R[order], stable=True)]

    # Routes that were dropped before count as those of one more expert, the first.
    place_R = expert_R + 1
    counts = torch.bincount(place_R, minlength=num_experts + 1)
    starts = counts.cumsum(0) - counts
    behind_R = torch.empty_like(expert_R)
    behind_R[order] = torch.arange(len(order), device=order.device) - starts[place_R[order]]
    exact = labelled_T.sum().double() * capacity_factor * top_k / num_experts
    kept_R = behind_R < torch.ceil(exact - ROUNDING)
    return torch.where(kept_R, expert_R, -1).view(num_tokens, top_k)


def keep_within_capacity(
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    labelled_T: Tensor,
    num_experts: int,
    capacity_factor: float,
    backend: Backend = "reference",
) -> Tensor:
    """Expert ids with -1 where a route is dropped, int64 [T, K].

    :param topk_idx_TK: int64 [T, K] distinct expert ids of each token; -1 where a route was dropped
        before.
    :param topk_weights_TK: [T, K] router weights; only their values matter.
    :param labelled_T: boolean [T].
    """
    keep = capacity_triton if backend == "triton" else capacity_ref
    return keep(topk_idx_TK, topk_weights_TK, labelled_T, num_experts, capacity_factor)


def most_routes(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Routes that an expert takes from a rank at most, on the host.

    :param num_tokens: tokens of a rank's micro-batch at most.
    """
    return math.ceil(num_tokens * factor * top_k / num_experts - ROUNDING)
