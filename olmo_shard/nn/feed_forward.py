"""The dense SwiGLU feed-forward (Shazeer, 2020)."""

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """w_down(silu(w_gate x) * w_up x)."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.w_gate = nn.Linear(d_model, hidden, bias=False)
        self.w_up = nn.Linear(d_model, hidden, bias=False)
        self.w_down = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))
