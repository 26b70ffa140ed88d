"""The routed experts of a layer that live on this rank."""

import torch
from torch import Tensor, nn

from olmo_shard.dispatch.dispatcher import DispatchedRows
from olmo_shard.kernels.backend import Backend
from olmo_shard.kernels.grouped_mlp import MainGrads
from olmo_shard.nn.readers import ParameterReaders


class RoutedExperts(nn.Module):
    """Stacked SwiGLU weights of e experts: w_gate_up [e, 2F, D] (gate first), w_down [e, D, F].

    Built with all experts; expert parallelism keeps a slice of the first dimension.
    """

    residual_outputs = ("w_down",)

    def __init__(self, num_experts: int, d_model: int, hidden: int) -> None:
        super().__init__()
        self.w_gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden, d_model))
        self.w_down = nn.Parameter(torch.empty(num_experts, d_model, hidden))
        self.backend: Backend = "reference"
        self.accumulate_into_main_grads = False
        """Whether backward adds to the weights' ``.grad`` in place where that is FP32; mode ``ddp``
        sets it. ``torch.autograd.grad`` then gets no gradients of these weights."""

    def forward(self, rows: DispatchedRows) -> Tensor:
        """One row for each received row: the weighted sum over its local experts, [R, D].

        :param rows: what a dispatcher hands over; how they get through the experts is theirs.
        """
        return rows.through(self.w_gate_up, self.w_down, self._main_grads(), self.backend)

    def parameter_readers(self) -> ParameterReaders:
        """The experts read their own stacked weights."""
        return [(self, self.parameters())]

    def _main_grads(self) -> MainGrads | None:
        gate_up, down = self.w_gate_up, self.w_down
        if not (self.accumulate_into_main_grads and gate_up.requires_grad and down.requires_grad):
            return None
        # Null where a hook collects them, or where somebody took them away.
        if gate_up.grad is None or down.grad is None or gate_up.grad.dtype != torch.float32:
            return None
        return MainGrads(gate_up.grad, down.grad)
