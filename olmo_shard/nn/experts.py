"""The routed experts of a layer that this rank holds.

Shape letters: e local experts, D width, F expert width.
"""

import torch
from torch import nn

from olmo_shard.dispatch.pending_combine import PendingCombine
from olmo_shard.dispatch.pending_dispatch import PendingDispatch
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
        """Whether backward adds to the weights' FP32 ``.grad`` in place. Mode ``ddp`` sets it.
        ``torch.autograd.grad`` then returns no gradients of these weights."""

    def forward(self, pending: PendingDispatch) -> PendingCombine:
        """Wait for the rows, run the experts, and start to return the outputs.

        The experts must be called as a module, ``experts(pending)``: FSDP gathers the weights in a
        hook before this forward and frees them in a hook after it. FSDP finds the tensors of
        ``pending`` and of the result, and so the moment of the backward hooks, since both are named
        tuples.

        :param pending: a dispatch under way. The transport chooses how the experts run.
        """
        main_grads = self._main_grads()
        return pending.run_experts(self.w_gate_up, self.w_down, main_grads, self.backend)

    def parameter_readers(self) -> ParameterReaders:
        """The experts read their own stacked weights."""
        return [(self, self.parameters())]

    def _main_grads(self) -> MainGrads | None:
        gate_up, down = self.w_gate_up, self.w_down
        if not (self.accumulate_into_main_grads and gate_up.requires_grad and down.requires_grad):
            return None
        # ``None`` if a hook collects the gradients, or if user code has removed them.
        if gate_up.grad is None or down.grad is None or gate_up.grad.dtype != torch.float32:
            return None
        return MainGrads(gate_up.grad, down.grad)
