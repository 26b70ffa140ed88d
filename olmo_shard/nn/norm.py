"""RMSNorm (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor, nn

from olmo_shard.nn.readers import ParameterReaders


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) x weight over the last dimension, computed in FP32.

    :param width: size of the last dimension.
    :param eps: added to the mean square.
    """

    starts_at_one = ("weight",)

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised tensor, in the shape and type of ``x``."""
        x32 = x.float()
        # The weight multiplies in FP32, too: the result is rounded once.
        scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + self.eps)
        return (x32 * scale * self.weight.float()).to(x.dtype)

    def parameter_readers(self) -> ParameterReaders:
        """The norm reads its own weight."""
        return [(self, self.parameters())]
