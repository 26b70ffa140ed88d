"""Part a of the GPU check, second half: the grouped matrix products.

Each kernel runs by itself, on inputs that the reference has computed; then the operator runs with
autograd. ``olmo_shard/kernels/grouped_mlp.py`` explains the names of the tensors.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from olmo_shard.kernels.grouped_gemm import grouped_gemm, grouped_gemm_ref
from olmo_shard.kernels.grouped_mlp import MainGrads, grouped_mlp, weight_of_pairs
from olmo_shard.kernels.grouped_swiglu import swiglu_bwd, swiglu_bwd_ref, swiglu_fwd, swiglu_fwd_ref
from olmo_shard.kernels.grouped_wgrad import grouped_wgrad, grouped_wgrad_ref
from scripts.gpu_check.compare import Setup, close, equal, poisoned
from scripts.gpu_check.inputs import Draw, Kind, layout_of
from scripts.gpu_check.kernels import DTYPES, named
from scripts.gpu_check.row import Check, Row


class Shape(NamedTuple):
    """Sizes and routing of one case."""

    rows: int
    width: int
    hidden: int
    experts: int
    top_k: int
    kind: Kind
    dropped: float


# Odd sizes, an empty expert and dropped routes; sizes that fill tiles; one expert with all rows.
SHAPES = [
    Shape(301, 131, 77, 5, 2, "skewed", 0.2),
    Shape(4096, 1024, 512, 64, 8, "skewed", 0.0),
    Shape(1000, 256, 128, 9, 1, "last", 0.0),
]
TINY = [Shape(7, 19, 11, 5, 2, "skewed", 0.2), Shape(4, 16, 8, 4, 1, "last", 0.0)]


class Operands(NamedTuple):
    """Inputs of all kernels for one shape; the reference has computed h, a and dh."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    gate_up: Tensor
    down: Tensor
    h: Tensor
    a: Tensor
    dh: Tensor
    start_up: Tensor
    """FP32 main gradient before the kernel adds to it."""
    start_down: Tensor
    """FP32 main gradient before the kernel adds to it."""
    row: Tensor
    offsets: Tensor

    def upcast(self) -> "Operands":
        """The operands in FP32; integers stay as they are."""
        return Operands._make(x.float() if x.is_floating_point() else x for x in self)


def checks(setup: Setup) -> Iterator[Check]:
    """The checks of the grouped products."""
    for dtype in DTYPES:
        shapes = SHAPES
        if setup.tiny:  # the interpreter is much slower in bf16
            shapes = TINY if dtype == torch.float32 else TINY[:1]
        for name in STAGES:
            check = f"{name} {named(dtype)}"
            yield Check(check, _bound(check_stage, setup, check, name, dtype, shapes))
        check = f"batch invariance {named(dtype)}"
        yield Check(check, _bound(check_invariance, setup, check, dtype, shapes[0]))
        for main in (True, False):
            check = f"grouped_mlp {named(dtype)}{', main gradients' if main else ''}"
            yield Check(check, _bound(check_operator, setup, check, dtype, shapes, main))


def _bound(function: Callable[..., Row], *arguments: Any) -> Callable[[], list[Row]]:
    return lambda: [function(*arguments)]


def operands(setup: Setup, shape: Shape, dtype: torch.dtype) -> Operands:
    """Draw the inputs, and compute the intermediate tensors with the reference."""
    draw = Draw(setup, f"grouped {shape}")
    idx, weights = draw.routing(shape.kind, shape.rows, shape.experts, shape.top_k, shape.dropped)
    layout = layout_of(idx, shape.experts, spare=False)
    weight, row, offsets = weight_of_pairs(weights, layout.slot_P), layout.row_P, layout.offsets
    x, dy = (draw.normal(shape.rows, shape.width, dtype=dtype) for _ in range(2))
    gate_up, down = draw.experts(shape.experts, shape.width, shape.hidden, dtype)
    h, a = swiglu_fwd_ref(x.float(), weight, gate_up.float(), row, offsets)
    dh, _, _ = swiglu_bwd_ref(dy.float(), weight, down.float(), h, row, offsets)
    h, a, dh = (each.to(dtype) for each in (h, a, dh))
    start_up, start_down = (draw.normal(*each.shape) for each in (gate_up, down))
    return Operands(x, dy, weight, gate_up, down, h, a, dh, start_up, start_down, row, offsets)


def _fwd(o: Operands, function: Any) -> dict[str, Tensor]:
    h, a = function(o.x, o.weight, o.gate_up, o.row, o.offsets)
    return {"h": h, "a": a}


def _bwd(o: Operands, function: Any) -> dict[str, Tensor]:
    results = function(o.dy, o.weight, o.down, o.h, o.row, o.offsets)
    return dict(zip(("dh", "a", "dweight"), results, strict=True))


def _down(o: Operands, function: Any) -> dict[str, Tensor]:
    return {"y": function(o.a, o.down, o.offsets, transposed=True)}


def _up(o: Operands, function: Any) -> dict[str, Tensor]:
    return {"dx": function(o.dh, o.gate_up, o.offsets, transposed=False)}


def _wgrad(o: Operands, function: Any) -> dict[str, Tensor]:
    written = torch.empty_like(o.gate_up), torch.empty_like(o.down)
    function(o.dh, o.x, o.offsets, written[0], right_index_P=o.row, add=False)
    function(o.dy, o.a, o.offsets, written[1], left_index_P=o.row, add=False)
    return dict(zip(("up", "down"), written, strict=True))


def _wgrad_add(o: Operands, function: Any) -> dict[str, Tensor]:
    mains = o.start_up.clone(), o.start_down.clone()
    function(o.dh, o.x, o.offsets, mains[0], right_index_P=o.row, add=True)
    function(o.dy, o.a, o.offsets, mains[1], left_index_P=o.row, add=True)
    return dict(zip(("up", "down"), mains, strict=True))


STAGES: dict[str, tuple[Callable[..., dict[str, Tensor]], Any, Any]] = {
    # Name: function that runs a kernel on operands, the kernel, its reference.
    "swiglu_fwd": (_fwd, swiglu_fwd, swiglu_fwd_ref),
    "swiglu_bwd": (_bwd, swiglu_bwd, swiglu_bwd_ref),
    "grouped_gemm, down": (_down, grouped_gemm, grouped_gemm_ref),
    "grouped_gemm, input gradient": (_up, grouped_gemm, grouped_gemm_ref),
    "grouped_wgrad": (_wgrad, grouped_wgrad, grouped_wgrad_ref),
    "grouped_wgrad, added": (_wgrad_add, grouped_wgrad, grouped_wgrad_ref),
}


def check_stage(
    setup: Setup, check: str, name: str, dtype: torch.dtype, shapes: list[Shape]
) -> Row:
    """Compare one kernel with its reference in FP32."""
    run, kernel, reference = STAGES[name]
    pairs = {}
    for number, shape in enumerate(shapes):
        o = operands(setup, shape, dtype)
        with poisoned(setup.device):
            results = run(o, kernel)
        expected = run(o.upcast(), reference)
        pairs |= {f"{key} of shape {number}": (results[key], expected[key]) for key in results}
    return close(check, dtype, pairs)


def check_invariance(setup: Setup, check: str, dtype: torch.dtype, shape: Shape) -> Row:
    """Compare every third pair computed alone, and among all pairs: bitwise equal.

    See [Note: batch invariance] in ``olmo_shard/kernels``.
    """
    o = operands(setup, shape, dtype)
    pairs = torch.arange(0, len(o.row), 3, device=setup.device)
    offsets = torch.bucketize(o.offsets, pairs).to(torch.int32)  # chosen pairs before each expert
    chosen = o._replace(row=o.row[pairs], weight=o.weight[pairs], offsets=offsets)
    chosen = chosen._replace(h=o.h[pairs], a=o.a[pairs], dh=o.dh[pairs])
    results = {}
    for name in list(STAGES)[:4]:
        run, kernel, _ = STAGES[name]
        everything, alone = run(o, kernel), run(chosen, kernel)
        results |= {f"{name}: {key}": (alone[key], everything[key][pairs]) for key in alone}
    return equal(check, results)


def check_operator(
    setup: Setup, check: str, dtype: torch.dtype, shapes: list[Shape], main: bool
) -> Row:
    """Compare the operator and its gradients with the reference.

    :param main: add the experts' gradients to FP32 main gradients.
    """
    pairs = {}
    for number, shape in enumerate(shapes):
        results = _operator(setup, shape, dtype, main, "triton")
        expected = _operator(setup, shape, dtype, main, "reference")
        for name, result in results.items():
            pairs[f"{name} of shape {number}"] = result, expected[name]
    return close(check, dtype, pairs)


def _operator(
    setup: Setup, shape: Shape, dtype: torch.dtype, main: bool, backend: Any
) -> dict[str, Tensor]:
    """Output and all gradients: of the kernels in ``dtype``, or of the reference in FP32."""
    draw, compute = Draw(setup, f"mlp {shape}"), dtype if backend == "triton" else torch.float32
    idx, weights = draw.routing(shape.kind, shape.rows, shape.experts, shape.top_k, shape.dropped)
    x, dy = (draw.normal(shape.rows, shape.width, dtype=dtype).to(compute) for _ in range(2))
    leaves = draw.experts(shape.experts, shape.width, shape.hidden, dtype).leaves(compute)
    mains = MainGrads(*(torch.ones_like(each, dtype=torch.float32) for each in leaves))
    layout = layout_of(idx, shape.experts, spare=backend == "triton")
    x.requires_grad_()
    weights.requires_grad_()

    def run() -> Tensor:
        y = grouped_mlp(x, weights, *leaves, layout, backend, mains if main else None)
        y.backward(dy)
        return y

    if backend == "triton":
        with poisoned(setup.device):
            y = run()
    else:
        y = run()
    gradients = mains if main else tuple(leaf.grad for leaf in leaves)
    results = dict(zip(("up", "down"), gradients, strict=True))
    results |= {"y": y, "x": x.grad, "router": weights.grad}
    return {name: result for name, result in results.items() if result is not None}
