"""Grouped matrix product: each expert's rows times its matrix, c[p] = a[p] @ b[expert of p].

Shape letters: P pairs ordered by expert, e experts, K inner width, N output width.

Example, P = 3, e = 2, offsets [0, 1, 3], K = N = 1: a = [[1], [2], [3]] and b = [[[10]], [[20]]]
give c = [[10], [40], [60]].

Products and sums are FP32, and the result is rounded once.

Bytes moved: (P K + P N + e K N) x itemsize. FLOPs: 2 P K N.
"""

import torch
from torch import Tensor

from olmo_shard.kernels.grouped_tiles import (
    GROUP_M,
    check_operands,
    find_tile,
    groups,
    max_tiles,
    tile_of_program,
    tile_product,
    tiles_of,
)
from olmo_shard.kernels.language import tl, triton


@triton.jit(do_not_specialize=["tiles_m"])
def _grouped_gemm_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    offsets_ptr,
    num_experts,
    tiles_m,
    N,
    K,
    stride_bk,
    stride_bn,
    EXPERTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Phase 1: this program's tile; programs after the last tile return.
    tile_m, tile_n = tile_of_program(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    expert, start, end = find_tile(offsets_ptr, tile_m, num_experts, EXPERTS, BLOCK_M)
    if expert == num_experts:
        return
    # Phase 2: the product. Offsets over rows and experts are 64 bits wide ([Note: 64 bits]).
    first = start.to(tl.int64)
    row_M = tl.arange(0, BLOCK_M)
    col_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner_K = tl.arange(0, BLOCK_K)
    is_row_M = row_M < end - start
    is_col_N = col_N < N
    a_ptrs = a_ptr + first * K + row_M[:, None] * K + inner_K[None, :]
    b_ptrs = b_ptr + expert.to(tl.int64) * K * N
    b_ptrs += inner_K[:, None] * stride_bk + col_N[None, :] * stride_bn
    acc = tile_product(
        a_ptrs,
        b_ptrs,
        BLOCK_K * stride_bk,
        is_row_M,
        is_col_N,
        K,
        EVEN_K,
        EVEN_N,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        UPCAST,
    )
    # Phase 3: round and store.
    c_ptrs = c_ptr + first * N + row_M[:, None] * N + col_N[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=is_row_M[:, None] & is_col_N[None, :])


def grouped_gemm(a_PK: Tensor, b: Tensor, offsets: Tensor, *, transposed: bool) -> Tensor:
    """Multiply each expert's rows by its matrix: [P, N] in the dtype of ``a_PK``.

    Rows after the last expert's are not written.

    :param a_PK: [P, K], contiguous.
    :param b: [e, N, K] if ``transposed``, else [e, K, N], contiguous.
    :param offsets: int32 [e + 1]: first row of each expert, and the end of the last one's.
    :param transposed: whether the matrices are stored with K as their last dimension.
    """
    num_experts, K = b.shape[0], a_PK.shape[1]
    N = b.shape[1 if transposed else 2]
    assert b.shape[2 if transposed else 1] == K
    check_operands(a_PK, b)
    c_PN = a_PK.new_empty(a_PK.shape[0], N)
    tiles = tiles_of(a_PK)
    tiles_m = max_tiles(a_PK.shape[0], num_experts, tiles.m)
    if tiles_m == 0:
        return c_PN
    _grouped_gemm_kernel[(tiles_m * triton.cdiv(N, tiles.n),)](
        a_PK,
        b,
        c_PN,
        offsets,
        num_experts,
        tiles_m,
        N,
        K,
        *((1, K) if transposed else (N, 1)),
        EXPERTS=triton.next_power_of_2(num_experts),
        EVEN_K=K % tiles.k == 0,
        EVEN_N=N % tiles.n == 0,
        GROUP_M=GROUP_M,
        **tiles.launch(),
    )
    return c_PN


def grouped_gemm_ref(a_PK: Tensor, b: Tensor, offsets: Tensor, *, transposed: bool) -> Tensor:
    """The grouped product in plain torch; arguments as for :func:`grouped_gemm`."""
    c_PN = a_PK.new_empty(a_PK.shape[0], b.shape[1 if transposed else 2])
    for expert, pairs in groups(offsets):
        matrix = b[expert].T if transposed else b[expert]
        torch.mm(a_PK[pairs], matrix, out=c_PN[pairs])
    return c_PN
