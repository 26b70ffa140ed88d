"""Random inputs for the GPU check: tokens, routing, experts. New ones for each seed."""

import hashlib
from typing import Literal, NamedTuple

import torch
from gpu_check_report import Setup
from torch import Tensor

from olmo_shard.kernels.expert_layout import ExpertLayout, expert_layout

Kind = Literal["uniform", "skewed", "last"]
"""Of routing. ``skewed``: nearly every token takes expert 0, none the last expert, the others fall
off. ``last``: all take the same ones, the last.
"""


class Draw:
    """A stream of random tensors.

    :param name: of the stream; with the seed it decides all values.
    """

    def __init__(self, setup: Setup, name: str) -> None:
        digest = hashlib.sha256(f"{setup.seed} {name}".encode()).digest()
        self.device = setup.device
        self._generator = torch.Generator(setup.device).manual_seed(
            int.from_bytes(digest[:6], "little")
        )

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator, device=self.device)
        return drawn.to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def chance(self, probability: float, *shape: int) -> Tensor:
        """Boolean."""
        return self.uniform(*shape) < probability

    def experts(self, num: int, width: int, hidden: int, dtype: torch.dtype) -> "Weights":
        gate_up = self.normal(num, 2 * hidden, width) / width**0.5
        down = self.normal(num, width, hidden) / hidden**0.5
        return Weights(gate_up.to(dtype), down.to(dtype))

    def routing(
        self, kind: Kind, tokens: int, experts: int, top_k: int, dropped: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Distinct experts int64 [T, K], -1 where a route was dropped; FP32 weights."""
        scores = self.normal(tokens, experts)
        if kind == "skewed":
            assert top_k < experts
            scores += torch.linspace(1, -1, experts, device=self.device)
            scores[:, 0] += 3
            scores[:, -1] = -torch.inf
        elif kind == "last":
            scores += 100 * torch.arange(experts, device=self.device)
        best, idx = scores.topk(top_k, dim=1)
        weights = best.softmax(dim=1)
        return torch.where(self.chance(dropped, *idx.shape), -1, idx), weights


class Weights(NamedTuple):
    """Of SwiGLU experts."""

    gate_up: Tensor
    """[e, 2F, D]."""
    down: Tensor
    """[e, D, F]."""

    def of(self, experts: range) -> "Weights":
        """Copies of some experts' weights."""
        return Weights(*(each[experts.start : experts.stop].clone() for each in self))

    def leaves(self, dtype: torch.dtype) -> "Weights":
        """Copies that collect gradients."""
        return Weights(*(each.detach().to(dtype, copy=True).requires_grad_() for each in self))


def layout_of(idx_TK: Tensor, experts: int, *, spare: bool) -> ExpertLayout:
    """The pairs of tokens whose experts are all here.

    :param spare: lists of static length, as launches without a look at the sizes have them.
    """
    max_pairs = idx_TK.numel() if spare else None
    return expert_layout(idx_TK.int(), experts, max_pairs)
