"""Part c of the GPU check: times of the kernels, compared with peak rates and with a baseline.

Peak rates are measured in the same rounds as the kernels: FLOP/s of ``torch.mm`` with as many
FLOPs, bytes/s of a copy. A prediction is a roofline at these rates, for the bytes and FLOPs that
the kernels' docstrings state. The prediction of a peak rate itself is the vendor's figure.

Shape letters: P pairs (token, expert), F expert width.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from olmo_shard.kernels.grouped_gemm import grouped_gemm
from olmo_shard.kernels.grouped_mlp import (
    MainGrads,
    Saved,
    grouped_mlp,
    grouped_mlp_bwd,
    grouped_mlp_fwd,
)
from olmo_shard.kernels.grouped_swiglu import swiglu_fwd
from scripts.gpu_check.bandwidth import check_adamw, check_moves, check_routing
from scripts.gpu_check.compare import Setup, measurement
from scripts.gpu_check.inputs import Kind
from scripts.gpu_check.row import Check, Row
from scripts.gpu_check.timing import medians, peak_memory, roofline, stated_bandwidth, stated_flops
from scripts.gpu_check.variants import (
    BF16,
    FULL,
    TINY,
    baseline_backward,
    baseline_forward,
    copying,
    dense_backward,
    dense_forward,
    make_layer,
)

OVER_BASELINE, OF_DENSE, SLACK = 1.2, 0.7, 1.03
"""Targets: speed relative to permute + grouped_mm + SwiGLU, share of the rate of ``torch.mm``, and
peak memory relative to the tensors that must exist."""


class Work(NamedTuple):
    """FLOPs and bytes of a forward or a backward."""

    name: str
    flops: float
    num_bytes: float
    baseline_bytes: float
    """Bytes that only the baseline moves."""


def checks(setup: Setup) -> Iterator[Check]:
    """The checks of part c."""
    kinds: tuple[Kind, ...] = ("uniform", "skewed")
    for kind in kinds:
        yield Check(f"grouped forward, {kind}", partial(check_forward, setup, kind))
    for kind in kinds:
        yield Check(f"grouped backward, {kind}", partial(check_backward, setup, kind))
    yield Check("grouped_mlp memory", lambda: check_memory(setup))
    for kind in kinds:
        yield Check(f"row moves, {kind}", partial(check_moves, setup, kind))
    yield Check("plan, capacity, layout", lambda: check_routing(setup))
    yield Check("adamw", lambda: check_adamw(setup))


def check_forward(setup: Setup, kind: Kind) -> Iterator[Row]:
    """Forward from rows to one output per pair. No variant sums the pairs of a row."""
    sizes = TINY if setup.tiny else FULL
    layer = make_layer(setup, sizes, kind)
    row_P, offsets = layer.layout.row_P, layer.layout.offsets
    gate_up, down = layer.experts

    def ours() -> Tensor:
        _, a_PF = swiglu_fwd(layer.x, layer.weight_P, gate_up, row_P, offsets)
        return grouped_gemm(a_PF, down, offsets, transposed=True)

    variants: dict[str, Callable[[], object]] = {"ours": ours}
    variants |= baseline_forward(setup, layer)
    variants["dense"] = dense_forward(sizes, layer)
    work = Work(
        f"forward, {kind}", sizes.flops, sizes.forward_bytes(), sizes.baseline_bytes(wide=2)
    )
    yield from _grouped_rows(setup, work, variants)


def check_backward(setup: Setup, kind: Kind) -> Iterator[Row]:
    """Backward to gradients of rows (per pair), router weights and experts.

    The kernels add the experts' gradients in FP32; the baseline leaves them in bf16.
    """
    sizes = TINY if setup.tiny else FULL
    layer = make_layer(setup, sizes, kind)
    row_P, offsets = layer.layout.row_P, layer.layout.offsets
    fixed = layer.experts.gate_up, layer.experts.down, row_P, offsets
    _, h_P2F = grouped_mlp_fwd(layer.x, layer.weight_P, *fixed)
    saved = Saved(layer.x, layer.weight_P, h_P2F, *fixed)
    mains = MainGrads(*(torch.zeros_like(each, dtype=torch.float32) for each in layer.experts))
    variants: dict[str, Callable[[], object]] = {
        "ours": lambda: grouped_mlp_bwd(layer.dy, saved, *mains, add=True)
    }
    variants |= baseline_backward(setup, layer, h_P2F)
    variants["dense"] = dense_backward(sizes, layer, h_P2F)
    work = Work(
        f"backward, {kind}", 2 * sizes.flops, sizes.backward_bytes(), sizes.baseline_bytes(wide=2)
    )
    yield from _grouped_rows(setup, work, variants)


def _grouped_rows(
    setup: Setup, work: Work, variants: dict[str, Callable[[], object]]
) -> Iterator[Row]:
    what, flops, num_bytes, baseline_bytes = work
    # Measure the variants and the peak rates in the same rounds.
    num_copied, copy = copying(setup)
    times = medians(setup, variants | {"copy": copy})
    copy_rate, dense_rate = num_copied / times["copy"], flops / times["dense"]
    flop_peak, bandwidth = stated_flops(setup), stated_bandwidth(setup)
    # What the roofline predicts for the kernels, and for their ratio to the baseline.
    predicted = roofline(flops, num_bytes, dense_rate, copy_rate)
    baselines = {name: times[name] for name in ("eager", "compiled") if name in times}
    best = min(baselines, key=lambda name: baselines[name])
    rates = (f"{name} {flops / seconds / 1e12:.0f}" for name, seconds in baselines.items())
    over_baseline = (predicted + baseline_bytes / copy_rate) / predicted
    row = partial(measurement, setup)

    yield row(f"torch.mm, {what}", "TFLOP/s", dense_rate / 1e12, flop_peak and flop_peak / 1e12)
    yield row(f"copy, {what}", "GB/s", copy_rate / 1e9, bandwidth and bandwidth / 1e9)
    ours = flops / times["ours"] / 1e12
    yield row(f"grouped {what}", "TFLOP/s", ours, flops / predicted / 1e12)
    share = times["dense"] / times["ours"]
    yield row(f"grouped {what} / torch.mm", "ratio", share, times["dense"] / predicted, OF_DENSE)
    yield row(
        f"grouped {what} / permute + grouped_mm + SwiGLU",
        "ratio",
        baselines[best] / times["ours"],
        over_baseline,
        OVER_BASELINE,
        note=f"baselines in TFLOP/s: {', '.join(rates)}; compared with the faster, {best}",
    )


def check_memory(setup: Setup) -> Iterator[Row]:
    """Peak memory: h, a and one output per pair; no input may be expanded to pairs."""
    sizes = TINY if setup.tiny else FULL
    layer = make_layer(setup, sizes, "uniform")
    x, weights = layer.x.requires_grad_(), layer.weights.requires_grad_()
    experts = layer.experts.leaves(BF16)
    mains = MainGrads(*(torch.zeros_like(each, dtype=torch.float32) for each in experts))
    kept: list[Any] = []

    def forward() -> None:
        kept.append(grouped_mlp(x, weights, *experts, layer.layout, "triton", mains))

    pairs, expanded = sizes.pairs, 2 * sizes.pairs * sizes.width
    budget = 2 * pairs * (2 * sizes.hidden + sizes.hidden) + expanded
    names = {
        "forward": (forward, "h, a, y of pairs"),
        "backward": (lambda: kept[0].backward(layer.dy), "dh, a, dx of pairs"),
    }
    for name, (run, what) in names.items():
        peak = peak_memory(setup, run)
        note = f"budget: {what}; with rows expanded {(budget + expanded) / 1e9:.3f} GB"
        yield measurement(
            setup,
            f"grouped_mlp {name}, peak memory",
            "GB",
            peak / 1e9,
            budget / 1e9,
            SLACK * budget / 1e9,
            at_most=True,
            note=note,
        )
