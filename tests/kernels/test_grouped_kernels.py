"""The kernels of the grouped SwiGLU in Triton's interpreter against the references."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from olmo_shard.kernels.expert_layout import ExpertLayout
from olmo_shard.kernels.grouped_gemm import grouped_gemm, grouped_gemm_ref
from olmo_shard.kernels.grouped_mlp import MainGrads, grouped_mlp
from olmo_shard.kernels.grouped_swiglu import (
    swiglu_bwd,
    swiglu_bwd_ref,
    swiglu_fwd,
    swiglu_fwd_ref,
)
from olmo_shard.kernels.grouped_tiles import max_tiles
from olmo_shard.kernels.grouped_wgrad import grouped_wgrad, grouped_wgrad_ref
from tests.kernels.test_grouped_mlp import operands, scales
from tests.support.close import share_of_bar
from tests.support.memory import poisoned, vast
from tests.support.ranks import Groups
from tests.support.scales import swiglu_bwd_scale, swiglu_fwd_scale

SHAPES = [
    # Odd sizes; nothing at all; more rows than a tile, widths that fill tiles, an empty expert.
    {"counts": [1, 7, 0, 13], "rows": 13, "width": 36, "hidden": 20, "slots": 4},
    {"counts": [0, 0, 0], "rows": 2, "width": 8, "hidden": 8, "slots": 2},
    {"counts": [130, 0, 1, 64], "rows": 130, "width": 128, "hidden": 128, "slots": 2},
]


def with_dtype(
    leaves: tuple[Tensor, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weights, w_gate_up, w_down = leaves
    return x.to(dtype), weights, w_gate_up.to(dtype), w_down.to(dtype)


def spare(layout: ExpertLayout, pairs: int) -> ExpertLayout:
    """As a launch with a static size has it: rows behind the last pair, which name no row."""
    padding = layout.slot_P.new_full((pairs,), -1)
    return layout._replace(
        slot_P=torch.cat([layout.slot_P, padding]), row_P=torch.cat([layout.row_P, padding])
    )


def errors_of_stages(_: Any, shape: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    leaves, layout, dy_RD = operands(**shape)
    x, weights, w_gate_up, w_down = with_dtype(leaves, dtype)
    dy_RD = dy_RD.to(dtype)
    _, row_P, offsets, _ = layout
    weight_P = weights.flatten()[layout.slot_P]
    h_P2F, a_PF = swiglu_fwd_ref(x, weight_P, w_gate_up, row_P, offsets)
    dh_P2F, _, _ = swiglu_bwd_ref(dy_RD, weight_P, w_down, h_P2F, row_P, offsets)
    forward = x, weight_P, w_gate_up, row_P, offsets
    backward = dy_RD, weight_P, w_down, h_P2F, row_P, offsets
    down = dict(zip("ab", (a_PF, w_down), strict=True))
    up = dict(zip("ab", (dh_P2F, w_gate_up), strict=True))

    def wgrad(function: Any, left: Tensor, right: Tensor, dw: Tensor, **how: Any) -> Tensor:
        function(left, right, offsets, dw, **how)
        return dw

    def wgrad_scale(left: Tensor, right: Tensor, start: Tensor, **how: Any) -> Tensor:
        magnitudes = left.double().abs(), right.double().abs()
        return wgrad(grouped_wgrad_ref, *magnitudes, start.double(), **how)

    left = {"left_index_P": row_P, "add": False}
    right = {"right_index_P": row_P, "add": True}
    ones = torch.ones(w_gate_up.shape)
    with poisoned():
        # Of each stage: what the kernel gives, what the reference gives, the scale.
        stages = {
            "swiglu_fwd": (
                swiglu_fwd(*forward),
                swiglu_fwd_ref(*forward),
                swiglu_fwd_scale(*forward),
            ),
            "swiglu_bwd": (
                swiglu_bwd(*backward),
                swiglu_bwd_ref(*backward),
                swiglu_bwd_scale(*backward),
            ),
            "down": three_gemms(down["a"], down["b"], offsets, transposed=True),
            "up, input gradient": three_gemms(up["a"], up["b"], offsets, transposed=False),
            "down, weight gradient": (
                [wgrad(grouped_wgrad, dy_RD, a_PF, torch.empty_like(w_down), **left)],
                [wgrad(grouped_wgrad_ref, dy_RD, a_PF, torch.empty_like(w_down), **left)],
                [wgrad_scale(dy_RD, a_PF, torch.empty_like(w_down), **left)],
            ),
            "up, main gradient": (
                [wgrad(grouped_wgrad, dh_P2F, x, ones.clone(), **right)],
                [wgrad(grouped_wgrad_ref, dh_P2F, x, ones.clone(), **right)],
                [wgrad_scale(dh_P2F, x, ones, **right)],
            ),
        }
    return {
        stage: max(
            share_of_bar(mine, reference, scale=scale, dtype=dtype)
            for mine, reference, scale in zip(*three, strict=True)
        )
        for stage, three in stages.items()
    }


def three_gemms(a: Tensor, b: Tensor, offsets: Tensor, *, transposed: bool) -> list[list[Tensor]]:
    """The product by the kernel and by the reference, and its scale."""
    magnitudes = a.double().abs(), b.double().abs()
    return [
        [grouped_gemm(a, b, offsets, transposed=transposed)],
        [grouped_gemm_ref(a, b, offsets, transposed=transposed)],
        [grouped_gemm_ref(*magnitudes, offsets, transposed=transposed)],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=["odd", "empty", "tiles"])
def test_every_kernel_equals_its_reference(
    interpreted: Groups, shape: dict[str, int | list[int]], dtype: torch.dtype
) -> None:
    """Outputs start as NaN, so what a kernel leaves out shows."""
    (errors,) = interpreted(1).run(errors_of_stages, shape, dtype)
    assert max(errors.values()) <= 1, errors


def whole_operator(_: Any, main: bool) -> list[float]:
    shape = {"counts": [1, 7, 0, 13], "rows": 13, "width": 36, "hidden": 20, "slots": 4}
    leaves, layout, dy_RD = operands(**shape)

    def run(backend: Any, layout: ExpertLayout) -> list[Tensor]:
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        mains = MainGrads(*(torch.ones_like(leaf) for leaf in leaves[2:])) if main else None
        x, weights, w_gate_up, w_down = inputs
        y_RD = grouped_mlp(x, weights, w_gate_up, w_down, layout, backend, mains)
        y_RD.backward(dy_RD)
        gradients = [each.grad for each in inputs if each.grad is not None]
        return [y_RD, *gradients, *(mains or ())]

    with poisoned():
        found = run("triton", spare(layout, 5))
    expected = run("reference", layout)
    scale = list(scales(leaves, layout, dy_RD))
    if main:  # main gradients start at one
        scale[3:] = [each + 1 for each in scale[3:]]
    return [
        share_of_bar(mine, reference, scale=each)
        for mine, reference, each in zip(found, expected, scale, strict=True)
    ]


@pytest.mark.parametrize("main", [True, False])
def test_the_operator_by_triton_equals_the_operator_by_reference(
    interpreted: Groups, main: bool
) -> None:
    """With spare pairs, as launches of a static size have them."""
    (errors,) = interpreted(1).run(whole_operator, main)
    assert len(errors) == 5
    assert max(errors) <= 1, errors


def rows_alone_and_among_others(_: Any, dtype: torch.dtype) -> bool:
    """Whether some pairs give the same bits in a launch of their own."""
    leaves, layout, dy_RD = operands([9, 70, 3], rows=70, width=40, hidden=24, slots=3)
    x, weights, w_gate_up, w_down = with_dtype(leaves, dtype)
    weight_P = weights.flatten()[layout.slot_P]

    def stages(pairs: list[int], offsets: list[int]) -> list[Tensor]:
        index, ends = torch.tensor(pairs), torch.tensor(offsets, dtype=torch.int32)
        row_P, weight = layout.row_P[index], weight_P[index]
        h_P2F, a_PF = swiglu_fwd(x, weight, w_gate_up, row_P, ends)
        y_PD = grouped_gemm(a_PF, w_down, ends, transposed=True)
        dh_P2F, _, dweight_P = swiglu_bwd(dy_RD.to(dtype), weight, w_down, h_P2F, row_P, ends)
        dx_PD = grouped_gemm(dh_P2F, w_gate_up, ends, transposed=False)
        return [h_P2F, a_PF, y_PD, dh_P2F, dweight_P, dx_PD]

    everything = stages(list(range(82)), [0, 9, 79, 82])
    few = [4, 40, 78, 80]
    alone = stages(few, [0, 1, 3, 4])
    return all(torch.equal(a, b[few]) for a, b in zip(alone, everything, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_rows_result_does_not_depend_on_its_company(
    interpreted: Groups, dtype: torch.dtype
) -> None:
    assert interpreted(1).run(rows_alone_and_among_others, dtype) == [True]


def index_and_gathered_rows(_: Any, side: str, dtype: torch.dtype) -> tuple[bool, float]:
    """Whether rows read by index give the bits that a copy of these rows gives; the error of the
    sums, as a share of the bar.
    """
    # Blocks hold 32 or 64 pairs: less than one, exactly one, two, several and a rest, none.
    counts = [5, 32, 0, 64, 131, 0, 1]
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 36, generator=generator).to(dtype)
    other = torch.randn(sum(counts), 20, generator=generator).to(dtype)
    index_P = torch.randint(40, (sum(counts),), generator=generator)
    # Behind the last pair the index names no row, as launches of a static size have it.
    index = {f"{side}_index_P": torch.cat([index_P, index_P.new_full((70,), -1)])}

    def wgrad(function: Any, rows: Tensor, **index: Tensor) -> Tensor:
        left, right = (rows, other) if side == "left" else (other, rows)
        widest = torch.float64 if rows.dtype == torch.float64 else torch.float32
        dw = torch.full((len(counts), left.shape[1], right.shape[1]), 0.5, dtype=widest)
        function(left, right, offsets, dw, add=True, **index)
        return dw

    found = wgrad(grouped_wgrad, rows, **index)
    gathered = wgrad(grouped_wgrad, rows[index_P])
    expected = wgrad(grouped_wgrad_ref, rows[index_P])
    rows, other = rows.double().abs(), other.double().abs()
    scale = wgrad(grouped_wgrad_ref, rows[index_P])
    return torch.equal(found, gathered), share_of_bar(found, expected, scale=scale, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_weight_gradients_by_index_are_those_of_gathered_rows(
    interpreted: Groups, side: str, dtype: torch.dtype
) -> None:
    """To the last bit: the index carried through the loop names the rows of the step at hand."""
    ((equal, largest),) = interpreted(1).run(index_and_gathered_rows, side, dtype)
    assert equal
    assert largest <= 1


def far_rows(_: Any) -> list[float]:
    """Row 524,288 of width 4,096 starts at element 2^31."""
    row, width, hidden = 2**31 // 4096, 4096, 16
    x = vast(row + 1, width, dtype=torch.bfloat16)
    x[row] = torch.linspace(-1, 1, width)
    w = torch.linspace(-1, 1, 2 * hidden * width).view(1, 2 * hidden, width).bfloat16()
    weight, offsets = torch.ones(1), torch.tensor([0, 1], dtype=torch.int32)
    index, first = torch.tensor([row]), torch.tensor([0])
    h_P2F, _ = swiglu_fwd(x, weight, w, index, offsets)
    near = x[row:], weight, w, first, offsets
    expected, _ = swiglu_fwd_ref(*near)
    errors = [share_of_bar(h_P2F, expected, scale=swiglu_fwd_scale(*near)[0])]

    w_down = w[:, :hidden].reshape(1, width, hidden).contiguous()
    _, _, dweight = swiglu_bwd(x, weight, w_down, expected, index, offsets)
    near = x[row:], weight, w_down, expected, first, offsets
    _, _, dweight_ref = swiglu_bwd_ref(*near)
    scale = swiglu_bwd_scale(*near)[2]
    errors.append(share_of_bar(dweight, dweight_ref, scale=scale, dtype=torch.bfloat16))

    # One row alone: each gradient is a single product.
    dw, dw_ref = torch.empty(1, 16, width), torch.empty(1, 16, width)
    right = torch.ones(1, 16, dtype=torch.bfloat16)
    grouped_wgrad(right, x, offsets, dw, right_index_P=index, add=False)
    grouped_wgrad_ref(right.float(), x[row:].float(), offsets, dw_ref, add=False)
    errors.append(share_of_bar(dw, dw_ref, scale=dw_ref.abs()))
    dw, dw_ref = torch.empty(1, width, 16), torch.empty(1, width, 16)
    grouped_wgrad(x, right, offsets, dw, left_index_P=index, add=False)
    grouped_wgrad_ref(x[row:].float(), right.float(), offsets, dw_ref, add=False)
    return [*errors, share_of_bar(dw, dw_ref, scale=dw_ref.abs())]


def far_experts(_: Any) -> list[float]:
    """Expert 524,288 with matrices of 4,096 elements starts at element 2^31."""
    last, width, hidden = 2**31 // 4096, 64, 32
    w = vast(last + 1, 2 * hidden, width, dtype=torch.bfloat16)
    w[last] = torch.linspace(-1, 1, 2 * hidden * width).view(2 * hidden, width)
    offsets = torch.zeros(last + 2, dtype=torch.int32)
    offsets[-1] = 1
    one, weight, first = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1), torch.tensor([0])
    x = torch.linspace(-1, 1, width)[None].bfloat16()
    h_P2F, _ = swiglu_fwd(x, weight, w, first, offsets)
    near = x, weight, w[last:], first, one
    expected, _ = swiglu_fwd_ref(*near)
    errors = [share_of_bar(h_P2F, expected, scale=swiglu_fwd_scale(*near)[0])]
    square = w.view(last + 1, 64, 64)
    _, _, dweight = swiglu_bwd(x, weight, square, h_P2F.repeat(1, 2), first, offsets)
    near = x, weight, square[last:], h_P2F.repeat(1, 2), first, one
    _, _, dweight_ref = swiglu_bwd_ref(*near)
    scale = swiglu_bwd_scale(*near)[2]
    errors.append(share_of_bar(dweight, dweight_ref, scale=scale, dtype=torch.bfloat16))
    for transposed in (True, False):
        y = grouped_gemm(x, square, offsets, transposed=transposed)
        _, (y_ref,), (scale,) = three_gemms(x, square[last:], one, transposed=transposed)
        errors.append(share_of_bar(y, y_ref, scale=scale))
    return errors


@pytest.mark.parametrize("case", [far_rows, far_experts])
def test_offsets_beyond_2_to_the_31(interpreted: Groups, case: Callable[..., Any]) -> None:
    """Real accesses to addresses that 32 bits do not reach; nearly all of it takes no memory."""
    (errors,) = interpreted(1).run(case)
    assert max(errors) <= 1, errors


def test_tiles_are_enough_whatever_the_groups() -> None:
    assert max_tiles(0, 4, 128) == 0
    assert max_tiles(3, 4, 128) == 3
    for counts in ([1, 1, 1, 1], [129, 1, 0, 1], [128, 128, 1, 1], [500, 0, 0, 0]):
        needed = sum(-(-count // 128) for count in counts)
        assert needed <= max_tiles(sum(counts), len(counts), 128)
