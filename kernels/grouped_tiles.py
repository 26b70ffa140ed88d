"""What the grouped matrix products have in common: tile sizes, and which tile a program computes.

Rows of all experts lie one behind the other; ``offsets`` [e + 1], on the device, says where each
expert's begin. The grid is as large as any offsets could need (every expert may leave one tile
unfilled); programs beyond the last tile end at once.

Example, BLOCK_M = 4 and offsets [0, 5, 5, 8]: tile 0 is rows 0..3 of expert 0, tile 1 row 4, tile 2
rows 5..7 of expert 2; tiles 3 and 4, which other offsets could need, do nothing.

[Note: batch invariance] Tile sizes follow from type and GPU alone, a product runs over its inner
dimension in one order, and nothing is split over programs. So the result for a row is the same bits
whichever other rows share the launch.

[Note: 64 bits] Rows times width, and experts times a matrix, may pass 2^31 elements: those offsets
are computed in 64 bits. Inside one expert's matrix 32 bits suffice: ``check_operands`` asserts it.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from olmo_shard.kernels.language import interpreting, tl, triton

GROUP_M = 8
"""Tiles of rows whose column tiles run together, so that both operands come from the cache."""


class Tiles(NamedTuple):
    """Sizes of a program's tile, and how it is launched."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def launch(self) -> dict[str, Any]:
        """What all grouped kernels take besides their tensors."""
        return {
            "BLOCK_M": self.m,
            "BLOCK_N": self.n,
            "BLOCK_K": self.k,
            "UPCAST": interpreting(),  # its product of bf16 is wrong
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def tiles_of(rows: Tensor, accumulators: int = 1) -> Tiles:
    """16-bit types use tensor cores; FP32 is exact and slow: for comparisons.

    :param accumulators: that a program holds; before sm_90 registers suffice for one of full width.
    """
    if rows.dtype.itemsize != 2:
        return Tiles(64, 64, 32, 4, 2)
    narrow = rows.is_cuda and torch.cuda.get_device_capability(rows.device) < (9, 0)
    return Tiles(128, 64 if accumulators > 1 and narrow else 128, 64, 8, 3)


def max_tiles(num_rows: int, num_experts: int, block: int) -> int:
    """Tiles of rows at most, whatever the offsets: no group needs more than one partial tile."""
    return min(num_rows, num_rows // block + num_experts)


def check_operands(rows: Tensor, matrices: Tensor) -> None:
    """What the kernels take for granted. See [Note: 64 bits].

    :param rows: [.., K].
    :param matrices: [e, .., ..].
    """
    assert rows.is_contiguous()
    assert matrices.is_contiguous()
    assert rows.dtype == matrices.dtype
    assert matrices[0].numel() < 2**31, "an expert's matrix has more elements than 32 bits count"


def groups(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert that has pairs, for the references: its number, its pairs."""
    ends = offsets.tolist()
    for expert, (start, end) in enumerate(pairwise(ends)):
        if end > start:
            yield expert, slice(start, end)


@triton.jit
def find_tile(offsets_ptr, tile, num_experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, its first row and the end of the expert's rows.

    ``expert`` is ``num_experts`` where there is no such tile.

    :param EXPERTS: a power of two, at least ``num_experts``.
    """
    expert_E = tl.arange(0, EXPERTS)
    there = expert_E < num_experts
    start_E = tl.load(offsets_ptr + expert_E, mask=there, other=0)
    end_E = tl.load(offsets_ptr + expert_E + 1, mask=there, other=0)
    tiles_E = (end_E - start_E + BLOCK_M - 1) // BLOCK_M
    passed_E = tl.cumsum(tiles_E, 0) <= tile
    expert = tl.sum((passed_E & there).to(tl.int32), 0)
    first_tile = tl.sum(tl.where(passed_E & there, tiles_E, 0), 0)
    start = tl.sum(tl.where(expert_E == expert, start_E, 0), 0)
    end = tl.sum(tl.where(expert_E == expert, end_E, 0), 0)
    return expert, start + (tile - first_tile) * BLOCK_M, end


@triton.jit
def tile_product(
    a_ptrs,
    b_ptrs,
    b_step,
    there_M,
    there_N,
    K,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """A tile of rows times a tile of columns, over all of K: FP32 [BLOCK_M, BLOCK_N].

    :param a_ptrs: [BLOCK_M, BLOCK_K], of the first step; K runs along the memory.
    :param b_ptrs: [BLOCK_K, BLOCK_N], of the first step; the next one is ``b_step`` behind it.
    """
    inner_K = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        mask_a = there_M[:, None]
        if not EVEN_K:
            mask_a = mask_a & (inner_K < K - k)[None, :]
        a = tl.load(a_ptrs, mask=mask_a, other=0.0)
        if EVEN_K and EVEN_N:
            b = tl.load(b_ptrs)
        else:
            b = tl.load(b_ptrs, mask=(inner_K < K - k)[:, None] & there_N[None, :], other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += b_step
    return acc


@triton.jit
def tile_of_program(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row tile, column tile): GROUP_M row tiles share their column tiles' operand."""
    per_group = GROUP_M * tiles_n
    first = program // per_group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = program % per_group
    return first + within % height, within // height
