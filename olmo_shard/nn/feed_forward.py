"""The dense SwiGLU feed-forward (Shazeer, 2020)."""

import torch.nn.functional as F
from torch import Tensor, nn

from olmo_shard.nn.readers import ParameterReaders


class FeedForward(nn.Module):
    """w_down(silu(w_gate x) * w_up x).

    :param d_model: width of the input and of the output.
    :param hidden: width of the hidden layer.
    """

    compiled_methods = ("forward",)
    residual_outputs = ("w_down.weight",)

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.w_gate = nn.Linear(d_model, hidden, bias=False)
        self.w_up = nn.Linear(d_model, hidden, bias=False)
        self.w_down = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The output, in the shape of ``x``."""
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))

    def parameter_readers(self) -> ParameterReaders:
        """The feed-forward waits for all its weights: its forward may be one compiled graph."""
        return [(self, self.parameters())]
