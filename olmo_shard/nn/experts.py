"""The routed experts of a layer that live on this rank."""

import torch
from torch import Tensor, nn

from olmo_shard.dispatch.dispatcher import DispatchedRows
from olmo_shard.kernels.expert_layout import expert_layout
from olmo_shard.kernels.grouped_mlp import grouped_mlp


class RoutedExperts(nn.Module):
    """Stacked SwiGLU weights of e experts: w_gate_up [e, 2F, D] (gate first), w_down [e, D, F].

    Built with all experts; expert parallelism keeps a slice of the first dimension.
    """

    def __init__(self, num_experts: int, d_model: int, hidden: int) -> None:
        super().__init__()
        self.w_gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden, d_model))
        self.w_down = nn.Parameter(torch.empty(num_experts, d_model, hidden))

    def forward(self, rows: DispatchedRows) -> Tensor:
        """One row for each received row: the weighted sum over its local experts, [R, D]."""
        layout = expert_layout(rows.local_expert_Rm, self.w_gate_up.shape[0])
        weight_P = rows.weights_Rm.flatten()[layout.slot_P]
        return grouped_mlp(rows.x_RD, weight_P, self.w_gate_up, self.w_down, layout)
