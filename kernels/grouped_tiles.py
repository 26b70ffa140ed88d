"""Tile sizes of the grouped matrix products, and the tile that each program computes.

Shape letters: e experts; M, N and K the rows, columns and inner width of a product or tile.

The rows of all experts are stored one expert after the other. ``offsets`` [e + 1], on the device,
holds the first row of each expert. The grid has as many programs as any offsets could need, since
each expert may have one partial tile. Programs after the last tile return at once.

Example: BLOCK_M = 4 and offsets [0, 5, 5, 8]. Tile 0 is rows 0..3 of expert 0, tile 1 is row 4,
tile 2 is rows 5..7 of expert 2. Tiles 3 and 4, which other offsets could need, do nothing.

[Note: batch invariance] Tile sizes depend on dtype and GPU only. A program sums over the inner
dimension in one fixed order, and no sum is split over programs. So the result for a row is bitwise
the same whichever other rows share the launch.

[Note: 64 bits] Rows times width, and experts times matrix size, may exceed 2^31 elements: the
kernels compute these offsets in 64 bits. Within one expert's matrix 32 bits suffice, which
``check_operands`` asserts.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from olmo_shard.kernels.language import interpreting, tl, triton

GROUP_M = 8
"""Row tiles whose column tiles run close in time, so that both operands hit the L2 cache."""


class Tiles(NamedTuple):
    """Tile sizes of a program, and its launch parameters."""

    m: int
    """Rows."""
    n: int
    """Columns."""
    k: int
    """Inner width per step."""
    warps: int
    stages: int
    """Buffers of the software pipeline."""

    def launch(self) -> dict[str, Any]:
        """Keyword arguments that all grouped kernels take besides their tensors."""
        return {
            "BLOCK_M": self.m,
            "BLOCK_N": self.n,
            "BLOCK_K": self.k,
            "UPCAST": interpreting(),  # the interpreter multiplies bf16 incorrectly
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def tiles_of(rows: Tensor, accumulators: int = 1) -> Tiles:
    """Select the tile sizes for operands of a dtype on a device.

    16-bit dtypes use tensor cores. FP32 is exact and slow, and serves for comparisons.

    :param rows: an operand; its dtype and device count.
    :param accumulators: FP32 accumulators per program. Before sm_90 the registers suffice for one
        of full width only.
    """
    if rows.dtype.itemsize != 2:
        return Tiles(64, 64, 32, 4, 2)
    narrow = rows.is_cuda and torch.cuda.get_device_capability(rows.device) < (9, 0)
    return Tiles(128, 64 if accumulators > 1 and narrow else 128, 64, 8, 3)


def max_tiles(num_rows: int, num_experts: int, block: int) -> int:
    """Largest number of row tiles for any offsets: each expert has at most one partial tile."""
    return min(num_rows, num_rows // block + num_experts)


def check_operands(rows: Tensor, matrices: Tensor) -> None:
    """Assert the preconditions of the kernels. See [Note: 64 bits].

    :param rows: [rows, K].
    :param matrices: [e, rows, columns], one matrix per expert.
    """
    assert rows.is_contiguous()
    assert matrices.is_contiguous()
    assert rows.dtype == matrices.dtype
    assert matrices[0].numel() < 2**31, "an expert's matrix has more elements than 32 bits count"


def groups(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (expert, slice of its pairs) for each expert with pairs. For the references."""
    ends = offsets.tolist()
    for expert, (start, end) in enumerate(pairwise(ends)):
        if end > start:
            yield expert, slice(start, end)


@triton.jit
def find_tile(offsets_ptr, tile, num_experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of a row tile, the tile's first row and the end of the expert's rows.

    The expert is ``num_experts`` if there is no such tile.

    :param EXPERTS: a power of two, at least ``num_experts``.
    """
    expert_E = tl.arange(0, EXPERTS)
    is_expert = expert_E < num_experts
    start_E = tl.load(offsets_ptr + expert_E, mask=is_expert, other=0)
    end_E = tl.load(offsets_ptr + expert_E + 1, mask=is_expert, other=0)
    tiles_E = (end_E - start_E + BLOCK_M - 1) // BLOCK_M
    # The tile belongs to the first expert whose cumulative number of tiles exceeds it.
    passed_E = tl.cumsum(tiles_E, 0) <= tile
    expert = tl.sum((passed_E & is_expert).to(tl.int32), 0)
    first_tile = tl.sum(tl.where(passed_E & is_expert, tiles_E, 0), 0)
    start = tl.sum(tl.where(expert_E == expert, start_E, 0), 0)
    end = tl.sum(tl.where(expert_E == expert, end_E, 0), 0)
    return expert, start + (tile - first_tile) * BLOCK_M, end


@triton.jit
def tile_product(
    a_ptrs,
    b_ptrs,
    b_step,
    is_row_M,
    is_col_N,
    K,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Multiply a tile of rows by a tile of columns, over all of K: FP32 [BLOCK_M, BLOCK_N].

    :param a_ptrs: [BLOCK_M, BLOCK_K]: pointers of the first step; K is contiguous in memory.
    :param b_ptrs: [BLOCK_K, BLOCK_N]: pointers of the first step.
    :param b_step: elements from one step's ``b_ptrs`` to the next.
    """
    inner_K = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        mask_a = is_row_M[:, None]
        if not EVEN_K:
            mask_a = mask_a & (inner_K < K - k)[None, :]
        a = tl.load(a_ptrs, mask=mask_a, other=0.0)
        if EVEN_K and EVEN_N:
            b = tl.load(b_ptrs)
        else:
            b = tl.load(b_ptrs, mask=(inner_K < K - k)[:, None] & is_col_N[None, :], other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += b_step
    return acc


@triton.jit
def tile_of_program(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return (row tile, column tile) of a program; GROUP_M row tiles share their columns."""
    per_group = GROUP_M * tiles_n
    first = program // per_group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = program % per_group
    return first + within % height, within // height
