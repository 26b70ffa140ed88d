"""Baselines of part c of the GPU check: the experts with operations of torch, and dense products.

The baseline of the grouped kernels is permute, ``torch.nn.functional.grouped_mm`` and SwiGLU. The
upper limit of the FLOP rate is ``torch.mm`` with as many FLOPs; that of the byte rate is a copy.

Shape letters: T tokens, K top-k, P pairs (token, expert), D model width, F expert width, E experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_shard.kernels.expert_layout import ExpertLayout
from olmo_shard.kernels.grouped_mlp import weight_of_pairs
from scripts.gpu_check.compare import Setup
from scripts.gpu_check.inputs import Draw, Kind, Weights, layout_of

BF16 = torch.bfloat16


class Sizes(NamedTuple):
    """Sizes of a layer of routed experts."""

    tokens: int
    width: int
    hidden: int
    experts: int
    top_k: int

    @property
    def pairs(self) -> int:
        """P: number of pairs (token, expert)."""
        return self.tokens * self.top_k

    @property
    def flops(self) -> float:
        """FLOPs of a forward; a backward has twice as many."""
        return 6.0 * self.pairs * self.width * self.hidden

    def forward_bytes(self) -> float:
        """Bytes of a forward: read rows and weights once, write h and a, read a, write y."""
        values = self.tokens * self.width + self.pairs * (4 * self.hidden + self.width)
        return 2.0 * (values + 3 * self.experts * self.width * self.hidden)

    def backward_bytes(self) -> float:
        """Bytes of a backward.

        It reads rows three times (dy for da and for the down weights, x for the up weights) and h
        once. It writes dh and a, and reads a once and dh twice. It reads and writes the FP32 main
        gradients.
        """
        values = 3 * self.tokens * self.width
        values += self.pairs * (10 * self.hidden + self.width)
        weights = 3 * self.experts * self.width * self.hidden
        return 2.0 * (values + weights) + 8.0 * weights

    def baseline_bytes(self, wide: int) -> float:
        """Further bytes of the baseline: permuted rows, and values between products and SwiGLU.

        :param wide: number of such values per pair, divided by F.
        """
        return 2.0 * self.pairs * (2 * self.width + wide * self.hidden)


FULL = Sizes(tokens=32768, width=2048, hidden=1024, experts=64, top_k=8)
TINY = Sizes(tokens=4, width=16, hidden=8, experts=4, top_k=2)


class Layer(NamedTuple):
    """Inputs of a layer of routed experts."""

    x: Tensor
    dy: Tensor
    weights: Tensor
    experts: Weights
    layout: ExpertLayout
    weight_P: Tensor


def make_layer(setup: Setup, sizes: Sizes, kind: Kind) -> Layer:
    """Draw a layer's tokens, output gradients, routing and bf16 weights."""
    draw = Draw(setup, f"times {kind}")
    idx, weights = draw.routing(kind, sizes.tokens, sizes.experts, sizes.top_k)
    x, dy = (draw.normal(sizes.tokens, sizes.width, dtype=BF16) for _ in range(2))
    experts = draw.experts(sizes.experts, sizes.width, sizes.hidden, BF16)
    layout = layout_of(idx, sizes.experts, spare=True)
    return Layer(x, dy, weights, experts, layout, weight_of_pairs(weights, layout.slot_P))


def _activation(h_P2F: Tensor, weight_P: Tensor) -> Tensor:
    gate, up = h_P2F.chunk(2, dim=1)
    return F.silu(gate) * up * weight_P[:, None].to(h_P2F.dtype)


def _activation_backward(
    h_P2F: Tensor, da_PF: Tensor, weight_P: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of h, the activation itself, and the gradient of the router weights."""
    gate, up = h_P2F.chunk(2, dim=1)
    weight, sigmoid = weight_P[:, None].to(h_P2F.dtype), gate.sigmoid()
    silu = gate * sigmoid
    dweight_P = (da_PF * silu * up).sum(dim=1, dtype=torch.float32)
    da = da_PF * weight
    dgate = da * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([dgate, da * silu], dim=1), silu * up * weight, dweight_P


def _by_grouped_mm(layer: Layer, activation: Callable[..., Tensor]) -> Tensor:
    x_PD, ends = layer.x[layer.layout.row_P], layer.layout.offsets[1:]
    h_P2F = F.grouped_mm(x_PD, layer.experts.gate_up.transpose(1, 2), offs=ends)
    a_PF = activation(h_P2F, layer.weight_P)
    return F.grouped_mm(a_PF, layer.experts.down.transpose(1, 2), offs=ends)


def _eager_and_compiled(
    setup: Setup, function: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    """The baseline's elementwise function: eager, and on a GPU also compiled."""
    variants = {"eager": function}
    if not setup.tiny:
        variants["compiled"] = torch.compile(function, dynamic=False)
    return variants


def dense_forward(sizes: Sizes, layer: Layer) -> Callable[[], object]:
    """The forward's two products, each as one dense ``mm`` with as many FLOPs."""
    expanded = layer.x[layer.layout.row_P]
    wide, narrow = layer.experts.gate_up[0], layer.experts.down[0]
    return lambda: (expanded @ wide.T)[:, : sizes.hidden] @ narrow.T


def baseline_forward(setup: Setup, layer: Layer) -> dict[str, Callable[[], object]]:
    """The baseline's forward, with SwiGLU eager and compiled."""
    functions = _eager_and_compiled(setup, _activation).items()
    return {name: partial(_by_grouped_mm, layer, function) for name, function in functions}


def baseline_backward(setup: Setup, layer: Layer, h_P2F: Tensor) -> dict[str, Callable[[], object]]:
    """The baseline's backward, with SwiGLU eager and compiled."""
    functions = _eager_and_compiled(setup, _activation_backward).items()
    return {name: _baseline_backward(layer, h_P2F, function) for name, function in functions}


def _baseline_backward(
    layer: Layer, h_P2F: Tensor, activation_backward: Callable[..., tuple[Tensor, ...]]
) -> Callable[[], object]:
    """Backward from saved permuted rows and h. It recomputes a, as the kernels do."""
    row_P, ends = layer.layout.row_P, layer.layout.offsets[1:]
    gate_up, down = layer.experts
    x_PD = layer.x[row_P]

    def run() -> tuple[Tensor, ...]:
        dy_PD = layer.dy[row_P]
        da_PF = F.grouped_mm(dy_PD, down, offs=ends)
        dh_P2F, a_PF, dweight_P = activation_backward(h_P2F, da_PF, layer.weight_P)
        dw_down = F.grouped_mm(dy_PD.T, a_PF, offs=ends)
        dw_gate_up = F.grouped_mm(dh_P2F.T, x_PD, offs=ends)
        return F.grouped_mm(dh_P2F, gate_up, offs=ends), dweight_P, dw_gate_up, dw_down

    return run


def dense_backward(sizes: Sizes, layer: Layer, h_P2F: Tensor) -> Callable[[], object]:
    """The backward's four products, each as one dense ``mm`` with as many FLOPs."""
    dy_PD, dh_P2F = layer.dy[layer.layout.row_P], h_P2F
    a_PF = h_P2F[:, : sizes.hidden].contiguous()
    wide = layer.experts.gate_up[0]
    narrow = layer.experts.down[0]
    return lambda: (dy_PD @ narrow, dh_P2F @ wide, dy_PD.T @ a_PF, dh_P2F.T @ dy_PD)


def copying(setup: Setup) -> tuple[int, Callable[[], object]]:
    """A copy of 1 GiB: the bytes that it reads and writes, and the function."""
    size = 1024 if setup.tiny else 1 << 30
    source, target = (torch.zeros(size, dtype=torch.uint8, device=setup.device) for _ in range(2))
    return 2 * size, lambda: target.copy_(source)
