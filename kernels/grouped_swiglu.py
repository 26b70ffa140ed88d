"""The up-projection of all experts with SwiGLU in its epilogue; rows are read by index.

Shape letters: R rows, P pairs ordered by expert, D model width, F expert width, e local experts.

For each pair p = (row r, expert i) with router weight w, forward computes::

    gate, up = w_gate_up[i] @ x[r]          # [F] each; h[p] = (gate, up), rounded and saved
    a[p]     = silu(gate) * up * w

and backward computes, from the gradient dy[r] of the expert's output::

    da         = dy[r] @ w_down[i]          # [F]
    dweight[p] = sum over F of da * silu(gate) * up
    dh[p]      = (da * w * up * silu'(gate), da * w * silu(gate))

Example, D = F = 1: x = 2, w_gate_up = [[1], [3]], w = 0.5 give h = (2, 6) and a = silu(2) x 6 x 0.5
= 5.285. With w_down = 5 and dy = 1: da = 5, dweight = 5 x silu(2) x 6 = 52.85.

No [P, D] copy of the rows exists. Products, sums and the activation are FP32; h, a and dh are
rounded once. Bytes moved, if each row is read from memory once: forward
(R D + 3 P F + 2 e F D) x itemsize, backward (R D + 5 P F + e F D) x itemsize. FLOPs: forward
4 P D F, backward 2 P D F.
"""

import torch
import torch.nn.functional as F
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
def _swiglu_fwd_kernel(
    x_ptr,
    row_ptr,
    weight_ptr,
    w_ptr,
    h_ptr,
    a_ptr,
    offsets_ptr,
    num_experts,
    tiles_m,
    F,
    D,
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
    tile_m, tile_n = tile_of_program(tl.program_id(0), tiles_m, tl.cdiv(F, BLOCK_N), GROUP_M)
    expert, start, end = find_tile(offsets_ptr, tile_m, num_experts, EXPERTS, BLOCK_M)
    if expert == num_experts:
        return
    first = start.to(tl.int64)
    pair_M = tl.arange(0, BLOCK_M)
    col_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner_K = tl.arange(0, BLOCK_K)
    is_row_M = pair_M < end - start
    is_col_N = col_N < F
    row_M = tl.load(row_ptr + first + pair_M, mask=is_row_M, other=0).to(tl.int64)
    x_ptrs = x_ptr + row_M[:, None] * D + inner_K[None, :]
    gate_ptrs = w_ptr + expert.to(tl.int64) * 2 * F * D
    gate_ptrs += inner_K[:, None] + col_N[None, :] * D
    up_ptrs = gate_ptrs + F * D
    # Phase 2: gate and up in one loop, so that each tile of x is read once for both.
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, D, BLOCK_K):
        mask_x = is_row_M[:, None]
        if not EVEN_K:
            mask_x = mask_x & (inner_K < D - k)[None, :]
        x = tl.load(x_ptrs, mask=mask_x, other=0.0)
        if EVEN_K and EVEN_N:
            w_gate = tl.load(gate_ptrs)
            w_up = tl.load(up_ptrs)
        else:
            mask_w = (inner_K < D - k)[:, None] & is_col_N[None, :]
            w_gate = tl.load(gate_ptrs, mask=mask_w, other=0.0)
            w_up = tl.load(up_ptrs, mask=mask_w, other=0.0)
        if UPCAST:
            x, w_gate, w_up = x.to(tl.float32), w_gate.to(tl.float32), w_up.to(tl.float32)
        gate = tl.dot(x, w_gate, gate, input_precision="ieee")
        up = tl.dot(x, w_up, up, input_precision="ieee")
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K
        up_ptrs += BLOCK_K
    # Phase 3: store h, then the weighted activation.
    mask = is_row_M[:, None] & is_col_N[None, :]
    dtype = h_ptr.dtype.element_ty
    h_ptrs = h_ptr + first * 2 * F + pair_M[:, None] * (2 * F) + col_N[None, :]
    tl.store(h_ptrs, gate.to(dtype), mask=mask)
    tl.store(h_ptrs + F, up.to(dtype), mask=mask)
    # The activation uses the rounded values of h, as backward will.
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    weight_M = tl.load(weight_ptr + first + pair_M, mask=is_row_M, other=0.0)
    activation = gate * tl.sigmoid(gate) * up * weight_M[:, None]
    a_ptrs = a_ptr + first * F + pair_M[:, None] * F + col_N[None, :]
    tl.store(a_ptrs, activation.to(dtype), mask=mask)


def swiglu_fwd(
    x_RD: Tensor, weight_P: Tensor, w_gate_up: Tensor, row_P: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return h [P, 2F] and a [P, F]. Rows after the last pair are not written.

    :param x_RD: [R, D], contiguous.
    :param weight_P: FP32 [P]: router weight of each pair.
    :param w_gate_up: [e, 2F, D], gate first, contiguous.
    :param row_P: int64 [P]: row of each pair.
    :param offsets: int32 [e + 1]: first pair of each expert, and the end of the last one's.
    """
    num_experts, D = w_gate_up.shape[0], x_RD.shape[1]
    width = w_gate_up.shape[1] // 2
    num_pairs = row_P.shape[0]
    check_operands(x_RD, w_gate_up)
    h_P2F, a_PF = x_RD.new_empty(num_pairs, 2 * width), x_RD.new_empty(num_pairs, width)
    tiles = tiles_of(x_RD, accumulators=2)
    tiles_m = max_tiles(num_pairs, num_experts, tiles.m)
    if tiles_m:
        _swiglu_fwd_kernel[(tiles_m * triton.cdiv(width, tiles.n),)](
            x_RD,
            row_P,
            weight_P,
            w_gate_up,
            h_P2F,
            a_PF,
            offsets,
            num_experts,
            tiles_m,
            width,
            D,
            EXPERTS=triton.next_power_of_2(num_experts),
            EVEN_K=D % tiles.k == 0,
            EVEN_N=width % tiles.n == 0,
            GROUP_M=GROUP_M,
            **tiles.launch(),
        )
    return h_P2F, a_PF


@triton.jit(do_not_specialize=["num_pairs", "tiles_m"])
def _swiglu_bwd_kernel(
    dy_ptr,
    row_ptr,
    weight_ptr,
    w_ptr,
    h_ptr,
    dh_ptr,
    a_ptr,
    dweight_ptr,
    offsets_ptr,
    num_pairs,
    num_experts,
    tiles_m,
    F,
    D,
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
    tile_m, tile_n = tile_of_program(tl.program_id(0), tiles_m, tl.cdiv(F, BLOCK_N), GROUP_M)
    expert, start, end = find_tile(offsets_ptr, tile_m, num_experts, EXPERTS, BLOCK_M)
    if expert == num_experts:
        return
    first = start.to(tl.int64)
    pair_M = tl.arange(0, BLOCK_M)
    col_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner_K = tl.arange(0, BLOCK_K)
    is_row_M = pair_M < end - start
    is_col_N = col_N < F
    row_M = tl.load(row_ptr + first + pair_M, mask=is_row_M, other=0).to(tl.int64)
    dy_ptrs = dy_ptr + row_M[:, None] * D + inner_K[None, :]
    w_ptrs = w_ptr + expert.to(tl.int64) * D * F + inner_K[:, None] * F + col_N[None, :]
    # Phase 2: da, the gradient of the activation.
    da = tile_product(
        dy_ptrs,
        w_ptrs,
        BLOCK_K * F,
        is_row_M,
        is_col_N,
        D,
        EVEN_K,
        EVEN_N,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        UPCAST,
    )
    weight_M = tl.load(weight_ptr + first + pair_M, mask=is_row_M, other=0.0)
    h_ptr += first * 2 * F
    dh_ptr += first * 2 * F
    a_ptr += first * F
    # Phase 3: dh and a, a quarter of the columns at a time: registers do not suffice for all.
    dweight_M = tl.zeros((BLOCK_M,), dtype=tl.float32)
    halves = tl.split(da.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1))
    for half in tl.static_range(2):
        quarters = tl.split(halves[half].reshape(BLOCK_M, 2, BLOCK_N // 4).permute(0, 2, 1))
        for quarter in tl.static_range(2):
            column = tile_n * BLOCK_N + (2 * half + quarter) * (BLOCK_N // 4)
            dweight_M += _swiglu_bwd_columns(
                quarters[quarter],
                h_ptr,
                dh_ptr,
                a_ptr,
                weight_M,
                is_row_M,
                column,
                F,
                BLOCK_M,
                BLOCK_N // 4,
            )
    # Phase 4: one row of dweight per column tile, which the launcher sums in order: no atomics.
    dweight_ptr += tile_n.to(tl.int64) * num_pairs + first
    tl.store(dweight_ptr + pair_M, dweight_M, mask=is_row_M)


@triton.jit
def _swiglu_bwd_columns(
    da,
    h_ptr,
    dh_ptr,
    a_ptr,
    weight_M,
    is_row_M,
    column,
    F,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store dh and a for some columns of a tile, and return the columns' part of dweight."""
    pair_M = tl.arange(0, BLOCK_M)
    col_N = column + tl.arange(0, COLUMNS)
    mask = is_row_M[:, None] & (col_N < F)[None, :]
    at_h = pair_M[:, None] * (2 * F) + col_N[None, :]
    gate = tl.load(h_ptr + at_h, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + F + at_h, mask=mask, other=0.0).to(tl.float32)
    dtype = dh_ptr.dtype.element_ty
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dweight_M = tl.sum(da * (silu * up), 1)
    at_a = pair_M[:, None] * F + col_N[None, :]
    tl.store(a_ptr + at_a, (silu * up * weight_M[:, None]).to(dtype), mask=mask)
    da *= weight_M[:, None]
    dgate = da * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(dh_ptr + at_h, dgate.to(dtype), mask=mask)
    tl.store(dh_ptr + F + at_h, (da * silu).to(dtype), mask=mask)
    return dweight_M


def swiglu_bwd(
    dy_RD: Tensor,
    weight_P: Tensor,
    w_down: Tensor,
    h_P2F: Tensor,
    row_P: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dh [P, 2F], a [P, F] and dweight FP32 [P]; the other arguments as for ``swiglu_fwd``.

    After the last pair dweight is zero, and rows of dh and a are not written.

    :param dy_RD: [R, D], contiguous: gradient of the experts' output.
    :param w_down: [e, D, F], contiguous.
    :param h_P2F: [P, 2F]: h of the forward.
    """
    num_experts, D, width = w_down.shape
    num_pairs = row_P.shape[0]
    check_operands(dy_RD, w_down)
    tiles = tiles_of(dy_RD)
    tiles_m, tiles_n = max_tiles(num_pairs, num_experts, tiles.m), triton.cdiv(width, tiles.n)
    dh_P2F, a_PF = torch.empty_like(h_P2F), dy_RD.new_empty(num_pairs, width)
    dweight_NP = torch.zeros(tiles_n, num_pairs, dtype=torch.float32, device=dy_RD.device)
    if tiles_m:
        _swiglu_bwd_kernel[(tiles_m * tiles_n,)](
            dy_RD,
            row_P,
            weight_P,
            w_down,
            h_P2F,
            dh_P2F,
            a_PF,
            dweight_NP,
            offsets,
            num_pairs,
            num_experts,
            tiles_m,
            width,
            D,
            EXPERTS=triton.next_power_of_2(num_experts),
            EVEN_K=D % tiles.k == 0,
            EVEN_N=width % tiles.n == 0,
            GROUP_M=GROUP_M,
            **tiles.launch(),
        )
    return dh_P2F, a_PF, dweight_NP.sum(dim=0)


def swiglu_fwd_ref(
    x_RD: Tensor, weight_P: Tensor, w_gate_up: Tensor, row_P: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """The forward in plain torch; arguments as for :func:`swiglu_fwd`."""
    num_pairs = row_P.shape[0]
    h_P2F = x_RD.new_empty(num_pairs, w_gate_up.shape[1])
    a_PF = x_RD.new_empty(num_pairs, w_gate_up.shape[1] // 2)
    for expert, pairs in groups(offsets):
        torch.mm(x_RD[row_P[pairs]], w_gate_up[expert].T, out=h_P2F[pairs])
        gate, up = h_P2F[pairs].float().chunk(2, dim=1)
        a_PF[pairs] = (F.silu(gate) * up * weight_P[pairs, None]).to(a_PF.dtype)
    return h_P2F, a_PF


def swiglu_bwd_ref(
    dy_RD: Tensor, weight_P: Tensor, w_down: Tensor, h_P2F: Tensor, row_P: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward in plain torch; arguments as for :func:`swiglu_bwd`."""
    num_pairs, width = row_P.shape[0], w_down.shape[2]
    dh_P2F, a_PF = torch.empty_like(h_P2F), dy_RD.new_empty(num_pairs, width)
    dweight_P = torch.zeros_like(weight_P)
    for expert, pairs in groups(offsets):
        gate, up = h_P2F[pairs].float().chunk(2, dim=1)
        weight, sigmoid = weight_P[pairs, None], torch.sigmoid(gate)
        silu = gate * sigmoid
        da = (dy_RD[row_P[pairs]] @ w_down[expert]).float()
        dweight_P[pairs] = (da * (silu * up)).sum(dim=1)
        da *= weight
        dh_P2F[pairs, :width] = (da * up * sigmoid * (1 + gate * (1 - sigmoid))).to(dh_P2F.dtype)
        dh_P2F[pairs, width:] = (da * silu).to(dh_P2F.dtype)
        a_PF[pairs] = (silu * up * weight).to(a_PF.dtype)
    return dh_P2F, a_PF, dweight_P
