"""Random inputs of the GPU check: tokens, routing, weights of experts; the seed decides them.

Shape letters: T tokens, K top-k, E experts, e local experts, D model width, F expert width.
"""

import hashlib
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from olmo_shard.kernels.expert_layout import ExpertLayout, expert_layout
from scripts.gpu_check.compare import Setup

Kind = Literal["uniform", "skewed", "last"]
"""Kind of routing.

``uniform``: all experts are equally likely. ``skewed``: nearly every token chooses expert 0, no
token the last expert. ``last``: all tokens choose the last K experts.
"""


class Draw:
    """A stream of random tensors on the device.

    :param name: name of the stream; name and seed decide all values.
    """

    def __init__(self, setup: Setup, name: str) -> None:
        digest = hashlib.sha256(f"{setup.seed} {name}".encode()).digest()
        self.device = setup.device
        self._generator = torch.Generator(setup.device).manual_seed(
            int.from_bytes(digest[:6], "little")
        )

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw from the normal distribution in FP32, then round to ``dtype``."""
        drawn = torch.randn(shape, generator=self._generator, device=self.device)
        return drawn.to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        """FP32 values in [0, 1)."""
        return torch.rand(shape, generator=self._generator, device=self.device)

    def chance(self, probability: float, *shape: int) -> Tensor:
        """Boolean tensor; each element is true with the given probability."""
        return self.uniform(*shape) < probability

    def experts(self, num: int, width: int, hidden: int, dtype: torch.dtype) -> "Weights":
        """Weights of ``num`` SwiGLU experts."""
        gate_up = self.normal(num, 2 * hidden, width) / width**0.5
        down = self.normal(num, width, hidden) / hidden**0.5
        return Weights(gate_up.to(dtype), down.to(dtype))

    def routing(
        self, kind: Kind, tokens: int, experts: int, top_k: int, dropped: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Choose K distinct experts per token.

        :param dropped: probability with which a route is dropped.
        :returns: experts, int64 [T, K], -1 for a dropped route; router weights, FP32 [T, K].
        """
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
    """Weights of SwiGLU experts."""

    gate_up: Tensor
    """[e, 2F, D]: gate and up projection."""
    down: Tensor
    """[e, D, F]: down projection."""

    def of(self, experts: range) -> "Weights":
        """Copies of the weights of a range of experts."""
        return Weights(*(weight[experts.start : experts.stop].clone() for weight in self))

    def leaves(self, dtype: torch.dtype) -> "Weights":
        """Copies in ``dtype`` that require gradients."""
        copies = (weight.detach().to(dtype, copy=True) for weight in self)
        return Weights(*(copy.requires_grad_() for copy in copies))


def layout_of(idx_TK: Tensor, experts: int, *, spare: bool) -> ExpertLayout:
    """Expert layout of tokens whose experts are all on this rank.

    :param spare: give the lists their largest possible length, as if the host did not know the
        number of pairs.
    """
    max_pairs = idx_TK.numel() if spare else None
    return expert_layout(idx_TK.int(), experts, max_pairs)
