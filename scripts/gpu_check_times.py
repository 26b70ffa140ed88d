"""Part c of the GPU check: times of the kernels, against what a card can do and what others do.

Ceilings are measured in the same turns as the kernels: a plain matrix product of the same FLOPs, a
plain copy. Predictions are rooflines by these ceilings, from the bytes and FLOPs that the kernels'
docstrings state; those of the ceilings themselves are the vendor's figures.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_check_clock import medians, peak_memory, roofline, stated_bandwidth, stated_flops
from gpu_check_contenders import (
    BF16,
    FULL,
    TINY,
    copying,
    dense_backward,
    dense_forward,
    make_layer,
    others_backward,
    others_forward,
)
from gpu_check_inputs import Kind
from gpu_check_moves import check_adamw, check_moves, check_routing
from gpu_check_report import Setup, claim
from gpu_check_row import Check, Row
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

OVER_OTHERS, OF_DENSE, SLACK = 1.2, 0.7, 1.03
"""Targets: speed over permute + grouped_mm + SwiGLU, share of the plain product's rate, and peak
memory over what must be there at least."""


class Work(NamedTuple):
    """Of a forward or a backward."""

    name: str
    flops: float
    num_bytes: float
    others_bytes: float
    """That others move besides."""


def checks(setup: Setup) -> Iterator[Check]:
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
    """From rows to one output for each pair: neither side adds the pairs of a row."""
    sizes = TINY if setup.tiny else FULL
    layer = make_layer(setup, sizes, kind)
    row_P, offsets = layer.layout.row_P, layer.layout.offsets
    gate_up, down = layer.experts

    def ours() -> Tensor:
        _, a_PF = swiglu_fwd(layer.x, layer.weight_P, gate_up, row_P, offsets)
        return grouped_gemm(a_PF, down, offsets, transposed=True)

    contenders: dict[str, Callable[[], object]] = {"ours": ours}
    contenders |= others_forward(setup, layer)
    contenders["dense"] = dense_forward(sizes, layer)
    work = Work(f"forward, {kind}", sizes.flops, sizes.forward_bytes(), sizes.others_bytes(wide=2))
    yield from _grouped_rows(setup, work, contenders)


def check_backward(setup: Setup, kind: Kind) -> Iterator[Row]:
    """Gradients of rows (by pair), router weights and experts; others' stay in bf16."""
    sizes = TINY if setup.tiny else FULL
    layer = make_layer(setup, sizes, kind)
    row_P, offsets = layer.layout.row_P, layer.layout.offsets
    fixed = layer.experts.gate_up, layer.experts.down, row_P, offsets
    _, h_P2F = grouped_mlp_fwd(layer.x, layer.weight_P, *fixed)
    saved = Saved(layer.x, layer.weight_P, h_P2F, *fixed)
    mains = MainGrads(*(torch.zeros_like(each, dtype=torch.float32) for each in layer.experts))
    contenders: dict[str, Callable[[], object]] = {
        "ours": lambda: grouped_mlp_bwd(layer.dy, saved, *mains, add=True)
    }
    contenders |= others_backward(setup, layer, h_P2F)
    contenders["dense"] = dense_backward(sizes, layer, h_P2F)
    work = Work(
        f"backward, {kind}", 2 * sizes.flops, sizes.backward_bytes(), sizes.others_bytes(wide=2)
    )
    yield from _grouped_rows(setup, work, contenders)


def _grouped_rows(
    setup: Setup, work: Work, contenders: dict[str, Callable[[], object]]
) -> Iterator[Row]:
    what, flops, num_bytes, others_bytes = work
    num_copied, copy = copying(setup)
    times = medians(setup, contenders | {"copy": copy})
    copy_rate, dense_rate = num_copied / times["copy"], flops / times["dense"]
    flop_peak, bandwidth = stated_flops(setup), stated_bandwidth(setup)
    predicted = roofline(flops, num_bytes, dense_rate, copy_rate)
    others = {name: times[name] for name in ("eager", "compiled") if name in times}
    best = min(others, key=lambda name: others[name])
    note = ", ".join(f"{name} {flops / each / 1e12:.0f}" for name, each in others.items())
    over_others = (predicted + others_bytes / copy_rate) / predicted
    named = partial(claim, setup)

    yield named(f"torch.mm, {what}", "TFLOP/s", dense_rate / 1e12, flop_peak and flop_peak / 1e12)
    yield named(f"copy, {what}", "GB/s", copy_rate / 1e9, bandwidth and bandwidth / 1e9)
    ours = flops / times["ours"] / 1e12
    yield named(f"grouped {what}", "TFLOP/s", ours, flops / predicted / 1e12)
    share = times["dense"] / times["ours"]
    yield named(f"grouped {what} / torch.mm", "ratio", share, times["dense"] / predicted, OF_DENSE)
    yield named(
        f"grouped {what} / permute + grouped_mm + SwiGLU",
        "ratio",
        others[best] / times["ours"],
        over_others,
        OVER_OTHERS,
        note=f"theirs in TFLOP/s: {note}; against the faster, {best}",
    )


def check_memory(setup: Setup) -> Iterator[Row]:
    """At the peak: h, a and one output for each pair; no input expanded to pairs."""
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
        yield claim(
            setup,
            f"grouped_mlp {name}, peak memory",
            "GB",
            peak / 1e9,
            budget / 1e9,
            SLACK * budget / 1e9,
            at_most=True,
            note=note,
        )
