"""Sum the pairs of each row: the outputs of its experts on this rank.

Shape letters: R rows, D width, P pairs (row, local expert), m slots of a row.

Example, rows of one element::

    y_PD    = [1, 2, 4, 8]
    pair_Rm = [[0, 3], [2, -1], [-1, -1]]        sums = [9, 4, 0]

A row's pairs are added in the order of its slots. The sum is FP32 and rounded once. Rows without
pairs are zero, and the output is fully written.

Bytes moved per pair: D x itemsize read. Per row: D x itemsize written, 4 m of indices read. FLOPs
per pair: D.
"""

import torch
from torch import Tensor

from olmo_shard.kernels.language import tl, triton
from olmo_shard.kernels.row_moves import row_block


@triton.jit
def sum_pairs_of_rows(
    y_ptr,
    pair_ptr,
    target_ptr,
    count,
    worker,
    workers,
    NUM_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the sum of the pairs ``pair[i]`` in row i of the target.

    Workers as in ``copy_rows``.
    """
    row = worker
    while row < count:
        for start in tl.static_range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < WIDTH
            total = tl.zeros([BLOCK], tl.float32)
            for slot in tl.static_range(NUM_SLOTS):
                pair = tl.load(pair_ptr + row * NUM_SLOTS + slot).to(tl.int64)
                is_pair = mask & (pair >= 0)
                values = tl.load(y_ptr + pair * WIDTH + column, mask=is_pair, other=0)
                total += values.to(tl.float32)
            total = total.to(target_ptr.dtype.element_ty)
            tl.store(target_ptr + row * WIDTH + column, total, mask=mask)
        row += workers


@triton.jit(do_not_specialize=["num_rows"])
def _sum_pairs_kernel(
    y_ptr,
    pair_ptr,
    out_ptr,
    num_rows,
    NUM_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    worker = tl.program_id(0).to(tl.int64)
    workers = tl.num_programs(0)
    sum_pairs_of_rows(y_ptr, pair_ptr, out_ptr, num_rows, worker, workers, NUM_SLOTS, WIDTH, BLOCK)


@torch.library.custom_op("olmo_shard::sum_pairs", mutates_args=())
def _sum_pairs_op(y_PD: Tensor, pair_Rm: Tensor) -> Tensor:
    assert y_PD.is_contiguous()
    assert pair_Rm.is_contiguous()
    num_rows, num_slots = pair_Rm.shape
    width = y_PD.shape[1]
    out_RD = y_PD.new_empty(num_rows, width)
    if num_rows:
        _sum_pairs_kernel[(num_rows,)](
            y_PD,
            pair_Rm,
            out_RD,
            num_rows,
            NUM_SLOTS=num_slots,
            WIDTH=width,
            BLOCK=row_block(width, y_PD.itemsize),
        )
    return out_RD


@_sum_pairs_op.register_fake
def _(y_PD: Tensor, pair_Rm: Tensor) -> Tensor:
    return y_PD.new_empty(pair_Rm.shape[0], y_PD.shape[1])


def sum_pairs(y_PD: Tensor, pair_Rm: Tensor) -> Tensor:
    """Return the sum of each row's pairs, [R, D] in the dtype of ``y_PD``.

    :param y_PD: [P, D], contiguous: the experts' outputs.
    :param pair_Rm: int32 [R, m], contiguous: the pairs of each row; -1 in empty slots.
    """
    return _sum_pairs_op(y_PD, pair_Rm)


def sum_pairs_ref(y_PD: Tensor, pair_Rm: Tensor) -> Tensor:
    """The sum of each row's pairs in plain torch."""
    padded = torch.cat([y_PD, y_PD.new_zeros(1, y_PD.shape[1])]).float()
    total = torch.zeros(len(pair_Rm), y_PD.shape[1], device=y_PD.device)
    for pair_R in pair_Rm.long().unbind(dim=1):
        total += padded[pair_R]  # index -1 is the row of zeros
    return total.to(y_PD.dtype)
