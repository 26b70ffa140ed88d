"""The routes that each expert keeps when its capacity is limited: decided at the source rank.

Shape letters: T tokens, K top-k, E experts.

An expert keeps at most ceil(capacity_factor x T' x K / E) routes of a rank's micro-batch. T' is the
number of tokens with a label, so that padding does not change the limit. Routes of tokens with a
label come first, then routes with higher weights, then earlier tokens. A NaN counts as the highest
weight.

Example: E = 2, K = 1, factor 1, four tokens. The last token has no label, so an expert keeps
ceil(1 x 3 x 1 / 2) = 2 routes::

    topk_idx_TK     = [[0], [0], [0], [0]]
    topk_weights_TK = [[0.5], [0.7], [0.5], [0.9]]
    kept            = [[0], [0], [-1], [-1]]    0.7, then the first 0.5; 0.9 has no label

The kernel runs one program per expert. The program copies the expert's routes, in token order, to a
list. An entry is the route and a key of 33 bits: the label, then the weight's bits, mapped so that
integers compare like the weights. The program then finds the last key to keep by a radix search,
with one pass over the keys per 9 bits.

Bytes moved: reads 16 x T x K per expert (the ids twice; all but the first read hit the L2 cache)
and 5 per route. The list takes 12 bytes per route; it is written once, and its keys are read up to
5 times. The output takes 8 bytes per route.
"""

import math

import torch
from torch import Tensor

from olmo_shard.kernels.backend import Backend
from olmo_shard.kernels.language import tl, triton

ROUNDING = 1e-9
"""Subtracted before rounding up, so that 1.1 x 10 in FP64 gives 11 and not 12."""
ROUTES = 1024
"""Routes per iteration of a program."""
WARPS = 8
"""Warps per program. Twice the routes, or half the warps, would need 255 registers per thread
instead of 126."""
DIGIT_BITS = 9
"""Bits per digit of the radix search."""
DIGITS = 4
"""Digits per key: 4 x 9 >= 33 bits. Three digits of 11 bits would need 255 registers."""


@triton.jit
def _ordered(weight):
    """Map an FP32 weight to 32 bits of an int64 that compare like the weights.

    -0.0 equals 0.0, and every NaN is the highest value.
    """
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
    """Number of routes that an expert keeps, by the same FP64 operations as the reference."""
    token = tl.arange(0, ROUTES).to(tl.int64)
    labelled = tl.zeros([ROUTES], tl.int32)
    for _ in range(tl.cdiv(num_tokens, ROUTES)):
        label = tl.load(labelled_ptr + token, mask=token < num_tokens, other=0)
        labelled += (label != 0).to(tl.int32)
        token += ROUTES
    # The factor is a compile-time constant: Triton passes a float argument as FP32.
    exact = tl.sum(labelled, axis=0).to(tl.float64) * tl.full([], FACTOR, tl.float64)
    exact = exact * TOP_K / tl.num_programs(0).to(tl.float64)
    most = tl.full([], num_tokens, tl.float64)
    return tl.minimum(tl.ceil(exact - tl.full([], ROUNDING, tl.float64)), most).to(tl.int32)


@triton.jit
def _last_key(
    key_ptr, num_keys, limit, BITS: tl.constexpr, DIGITS: tl.constexpr, ROUTES: tl.constexpr
):
    """Find the last key to keep, by a radix search from the highest digit.

    Returns the highest key that at most ``limit`` keys exceed, and the number of keys equal to it
    that fill the limit.
    """
    digit = tl.arange(0, 1 << BITS)
    known = tl.zeros([], tl.int64)  # the digits of the key that are determined so far
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
        # At least one digit qualifies: the keys with the known digits are at least ``room``.
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

    # Phase 1: where the expert's list starts (after the lists of lower experts), and its length.
    lower = tl.zeros([ROUTES], tl.int32)
    own = tl.zeros([ROUTES], tl.int32)
    route = tl.arange(0, ROUTES).to(tl.int64)
    for _ in range(tl.cdiv(num_routes, ROUTES)):
        picked = tl.load(topk_idx_ptr + route, mask=route < num_routes, other=-1)
        lower += ((picked >= 0) & (picked < expert)).to(tl.int32)
        own += (picked == expert).to(tl.int32)
        route += ROUTES
    first = tl.sum(lower, axis=0).to(tl.int64)
    num_keys = tl.sum(own, axis=0)
    key_ptr += first
    route_ptr += first

    # Phase 2: copy the expert's routes and their keys, in token order.
    end = tl.zeros([], tl.int64)
    route = tl.arange(0, ROUTES).to(tl.int64)
    for _ in range(tl.cdiv(num_routes, ROUTES)):
        picked = tl.load(topk_idx_ptr + route, mask=route < num_routes, other=-2)
        is_own = picked == expert
        weight = tl.load(weights_ptr + route, mask=is_own, other=0.0)
        labelled = tl.load(labelled_ptr + route // TOP_K, mask=is_own, other=0)
        key = _ordered(weight) + ((labelled != 0).to(tl.int64) << 32)
        index = end + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(key_ptr + index, key, mask=is_own)
        tl.store(route_ptr + index, route.to(tl.int32), mask=is_own)
        if expert == 0:
            tl.store(kept_ptr + route, tl.full([ROUTES], -1, tl.int64), mask=picked == -1)
        end += tl.sum(is_own.to(tl.int32), axis=0)
        route += ROUTES
    # Other threads of the program read the list that these threads wrote.
    tl.debug_barrier()

    # Phase 3: the last key to keep; -1 keeps all.
    last_key = tl.full([], -1, tl.int64)
    room = limit
    if num_keys > limit:
        last_key, room = _last_key(key_ptr, num_keys, limit, DIGIT_BITS, DIGITS, ROUTES)

    # Phase 4: write the expert for the routes that stay, and -1 for the others.
    index = tl.arange(0, ROUTES).to(tl.int64)
    for _ in range(tl.cdiv(num_keys, ROUTES)):
        is_key = index < num_keys
        key = tl.load(key_ptr + index, mask=is_key, other=-2)
        route = tl.load(route_ptr + index, mask=is_key, other=0).to(tl.int64)
        equal = (key == last_key).to(tl.int32)
        stays = (key > last_key) | ((equal > 0) & (tl.cumsum(equal, axis=0) <= room))
        tl.store(kept_ptr + route, tl.where(stays, expert, -1), mask=is_key)
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
    """Apply the capacity in one launch without synchronising; weights are FP32.

    Arguments as for :func:`keep_within_capacity`.
    """
    weights_TK = topk_weights_TK.detach()
    return _capacity_op(topk_idx_TK, weights_TK, labelled_T, num_experts, capacity_factor)


def capacity_ref(
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    labelled_T: Tensor,
    num_experts: int,
    capacity_factor: float,
) -> Tensor:
    """Apply the capacity in plain torch, by sorting.

    Arguments as for :func:`keep_within_capacity`.
    """
    num_tokens, top_k = topk_idx_TK.shape
    expert_R = topk_idx_TK.flatten()
    unlabelled_R = ~labelled_T[:, None].expand(num_tokens, top_k).flatten()
    # Order by (expert, label, weight, token): stable sorts, the least important key first.
    order = torch.argsort(topk_weights_TK.detach().flatten(), descending=True, stable=True)
    order = order[torch.argsort(unlabelled_R[order].to(torch.uint8), stable=True)]
    order = order[torch.argsort(expert_R[order], stable=True)]

    # Dropped routes are in place 0, the routes of expert i in place i + 1.
    place_R = expert_R + 1
    counts = torch.bincount(place_R, minlength=num_experts + 1)
    starts = counts.cumsum(0) - counts
    rank_R = torch.empty_like(expert_R)
    rank_R[order] = torch.arange(len(order), device=order.device) - starts[place_R[order]]
    exact = labelled_T.sum().double() * capacity_factor * top_k / num_experts
    kept_R = rank_R < torch.ceil(exact - ROUNDING)
    return torch.where(kept_R, expert_R, -1).view(num_tokens, top_k)


def keep_within_capacity(
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    labelled_T: Tensor,
    num_experts: int,
    capacity_factor: float,
    backend: Backend = "reference",
) -> Tensor:
    """Return the expert ids with -1 for each dropped route, int64 [T, K].

    :param topk_idx_TK: int64 [T, K]: distinct expert ids of each token; -1 for a route that was
        dropped before.
    :param topk_weights_TK: FP32 [T, K]: router weights; no gradient flows through them here.
    :param labelled_T: boolean [T]: whether the token has a label.
    :param num_experts: E.
    :param capacity_factor: capacity per expert, relative to an even share of the routes.
    :param backend: ``triton`` or ``reference``.
    """
    keep = capacity_triton if backend == "triton" else capacity_ref
    return keep(topk_idx_TK, topk_weights_TK, labelled_T, num_experts, capacity_factor)


def most_routes(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Largest number of routes that an expert keeps per rank, computed on the host.

    :param num_tokens: largest number of tokens in a rank's micro-batch.
    :param top_k: K.
    :param num_experts: E.
    :param factor: ``parallel.capacity_factor``.
    """
    return math.ceil(num_tokens * factor * top_k / num_experts - ROUNDING)
