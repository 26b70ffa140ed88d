"""The sums of a step over tokens, and the tensors that a step returns.

Shape letters: L MoE layers, N ranks of the run, W ranks of the expert-parallel group.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.distributed.comm_stats import StepCommStats
from olmo_shard.nn.layer_stats import LayerStats
from olmo_shard.nn.protocol import ModelOutput


class StepSums(NamedTuple):
    """FP64 sums over the tokens with a label, for a micro-batch, a window or a global batch."""

    cross_entropy: Tensor
    """Scalar."""
    logit_z_loss: Tensor
    """Scalar, unweighted."""
    layers: LayerStats
    """Statistics of the layers, [L, ...] each; see [Note: layer statistics] in ``nn/``."""

    @staticmethod
    def of(output: ModelOutput) -> "StepSums":
        """The sums of one micro-batch."""
        layers = {name: figure.double() for name, figure in output.layers.items()}
        return StepSums(output.cross_entropy.double(), output.logit_z_loss.double(), layers)

    def packed(self) -> Tensor:
        """All sums as one vector, the form in which micro-batches and ranks are added."""
        return torch.cat([figure.flatten() for figure in self._figures()])

    def unpacked(self, vector: Tensor) -> "StepSums":
        """Another packed vector, as sums in the shapes of these."""
        sizes = [figure.numel() for figure in self._figures()]
        cross_entropy, logit_z_loss, *layers = (
            part.view(figure.shape)
            for part, figure in zip(vector.split(sizes), self._figures(), strict=True)
        )
        return StepSums(cross_entropy, logit_z_loss, dict(zip(self.layers, layers, strict=True)))

    def _figures(self) -> list[Tensor]:
        return [self.cross_entropy, self.logit_z_loss, *self.layers.values()]


class StepOutput(NamedTuple):
    """The tensors of one step, on the device. Reading one waits for the step."""

    tokens: Tensor
    """int64 scalar: tokens with a label in the global batch, the divisor of all losses."""
    grad_norm: Tensor
    """FP64 scalar, before clipping."""
    applied: Tensor
    """Boolean scalar: false if the step was skipped."""
    sums: StepSums
    """Sums of the global batch, equal on every rank."""
    bias_range_L: Tensor
    """Largest minus smallest expert bias of each MoE layer, after the step."""
    local_sums: StepSums
    """Sums of this rank's window."""
    squares: Tensor
    """FP64 [shards]: the squared gradient norm of each shard that this rank owns."""
    limits: Tensor
    """FP64 [2]: the loss and the gradient norm above which the step is skipped."""
    comm_stats: StepCommStats
    """Bytes that this rank sent, and seconds that it waited."""
    received_LN: Tensor
    """FP64: rows that each layer's dispatch brought to each rank, rows from itself included."""
    waited_LN: Tensor
    """FP64: seconds that each layer waited on each rank for other ranks' rows; zero on CUDA."""
