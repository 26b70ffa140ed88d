"""Weight gradients of all experts: dw[i] (+)= sum of left[p] right[p]^T over expert i's pairs p.

Shape letters: P pairs ordered by expert, R rows, e experts; M and N the widths of the two sides.

Each side may be read by index. Then pair p is row ``index_P[p]`` of that side.

Example, P = 3, e = 2, offsets [0, 2, 3], M = N = 1: left = [[1], [2], [3]] and right = [[10], [20],
[30]] give dw = [[[50]], [[90]]].

[Note: main gradients] With ``add`` the kernel adds the sums to the values in ``dw``, in FP32. If
``dw`` holds the main gradients of a window, they accumulate there without a rounding and without
another pass over memory.

[Note: carried index] Each iteration of the loop reads BLOCK_K pairs. Their row indices were loaded
by the iteration before: the loop carries them by exactly one iteration. An index that is loaded in
the iteration that uses it occupies a stage of Triton's software pipeline. Two of three buffers then
remain for the operands, and each iteration waits for its own copies (``cp.async.wait_group 0``). An
index carried by two iterations disables the pipeline.

Sums are FP32, over the pairs of an expert in order.

Bytes moved: (P M + P N) x itemsize + 4 e M N, or 8 e M N with ``add``. FLOPs: 2 P M N.
"""

import torch
from torch import Tensor

from olmo_shard.kernels.grouped_tiles import GROUP_M, groups, tile_of_program, tiles_of
from olmo_shard.kernels.language import tl, triton


@triton.jit
def _wgrad_kernel(
    left_ptr,
    left_index_ptr,
    right_ptr,
    right_index_ptr,
    dw_ptr,
    offsets_ptr,
    M,
    N,
    INDEX_LEFT: tl.constexpr,
    INDEX_RIGHT: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Phase 1: this program's expert and tile. With ADD an expert without pairs keeps its values.
    expert = tl.program_id(1)
    tile_m, tile_n = tile_of_program(
        tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M
    )
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    if ADD and start == end:
        return
    # Phase 2: the sum of outer products over the expert's pairs, BLOCK_K pairs per iteration.
    row_M = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    col_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_M = row_M < M
    is_col_N = col_N < N
    inner_K = tl.arange(0, BLOCK_K).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # See [Note: carried index].
    left_K = _load_index(left_index_ptr, start + inner_K, end, INDEX_LEFT)
    right_K = _load_index(right_index_ptr, start + inner_K, end, INDEX_RIGHT)
    for first in range(start, end, BLOCK_K):
        is_pair_K = first + inner_K < end
        mask_left = is_pair_K[None, :]
        mask_right = is_pair_K[:, None]
        if not EVEN:
            mask_left = mask_left & is_row_M[:, None]
            mask_right = mask_right & is_col_N[None, :]
        left = tl.load(left_ptr + left_K[None, :] * M + row_M[:, None], mask=mask_left, other=0.0)
        right = tl.load(
            right_ptr + right_K[:, None] * N + col_N[None, :], mask=mask_right, other=0.0
        )
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        acc = tl.dot(left, right, acc, input_precision="ieee")
        next_K = first + inner_K + BLOCK_K
        left_K = _load_index(left_index_ptr, next_K, end, INDEX_LEFT)
        right_K = _load_index(right_index_ptr, next_K, end, INDEX_RIGHT)
    # Phase 3: add to the main gradients, or store.
    dw_ptrs = dw_ptr + expert.to(tl.int64) * M * N + row_M[:, None] * N + col_N[None, :]
    mask = is_row_M[:, None] & is_col_N[None, :]
    if ADD:
        acc += tl.load(dw_ptrs, mask=mask, other=0.0)
    tl.store(dw_ptrs, acc.to(dw_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_index(index_ptr, pair_K, end, INDEXED: tl.constexpr):
    """Row indices of BLOCK_K pairs, int64; 0 for pairs at and after ``end``."""
    if INDEXED:
        return tl.load(index_ptr + pair_K, mask=pair_K < end, other=0).to(tl.int64)
    return pair_K


def grouped_wgrad(
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    dw: Tensor,
    *,
    left_index_P: Tensor | None = None,
    right_index_P: Tensor | None = None,
    add: bool,
) -> None:
    """Write the weight gradients to ``dw``, or add them.

    :param left: [P, M], or [R, M] with an index; contiguous.
    :param right: [P, N], or [R, N] with an index; contiguous.
    :param offsets: int32 [e + 1]: first pair of each expert, and the end of the last one's.
    :param dw: [e, M, N], contiguous; FP32 with ``add``.
    :param left_index_P: int64 [P]: row of ``left`` for each pair; ``None`` if row p is pair p.
    :param right_index_P: int64 [P]: row of ``right`` for each pair; ``None`` if row p is pair p.
    :param add: whether the gradients are added to the values in ``dw``.
    """
    num_experts, M, N = dw.shape
    assert left.is_contiguous()
    assert right.is_contiguous()
    assert dw.is_contiguous()
    assert not add or dw.dtype == torch.float32
    assert M * N < 2**31, "an expert's matrix has more elements than 32 bits count"
    tiles = tiles_of(left)
    _wgrad_kernel[(triton.cdiv(M, tiles.m) * triton.cdiv(N, tiles.n), num_experts)](
        left,
        left_index_P,
        right,
        right_index_P,
        dw,
        offsets,
        M,
        N,
        INDEX_LEFT=left_index_P is not None,
        INDEX_RIGHT=right_index_P is not None,
        ADD=add,
        EVEN=M % tiles.m == 0 and N % tiles.n == 0,
        GROUP_M=GROUP_M,
        **tiles.launch(),
    )


def grouped_wgrad_ref(
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    dw: Tensor,
    *,
    left_index_P: Tensor | None = None,
    right_index_P: Tensor | None = None,
    add: bool,
) -> None:
    """The weight gradients in plain torch; arguments as for :func:`grouped_wgrad`."""
    if not add:
        dw.zero_()
    for expert, pairs in groups(offsets):
        lefts = left[pairs] if left_index_P is None else left[left_index_P[pairs]]
        rights = right[pairs] if right_index_P is None else right[right_index_P[pairs]]
        if not add:
            torch.mm(lefts.T, rights, out=dw[expert])
        elif lefts.dtype == dw.dtype:
            dw[expert].addmm_(lefts.T, rights)
        else:
            dw[expert].add_(lefts.T @ rights)
