"""One optimizer step: an accumulation window of micro-batches, then the optimizer's phases.

Nothing here reads a value back to the host; the sizes of expert exchanges are read where they are
made (``dispatch``), all else of a step on a GPU is queued without waiting.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.data.loader import MicroBatch
from olmo_shard.distributed import collectives
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.nn.moe import MoE
from olmo_shard.nn.router import update_after_step
from olmo_shard.nn.transformer import ModelOutput, Transformer
from olmo_shard.optim.sharded import DistributedOptimizer


class StepOutput(NamedTuple):
    """Device tensors of one step, equal on every rank."""

    tokens: Tensor
    """int64: tokens with a label in the global batch, the divisor of all losses."""
    grad_norm: Tensor
    applied: Tensor
    cross_entropy: Tensor
    """FP64 sum over the global batch; so are the next three."""
    logit_z_loss: Tensor
    lb_loss_L: Tensor
    router_z_loss_L: Tensor
    counts_LE: Tensor
    """FP64: routes of the global batch to each expert of each MoE layer."""
    bias_range_L: Tensor
    """Largest less smallest expert bias of each MoE layer, after the step."""
    squares: Tensor
    """FP64 [shards]: this rank's part of the squared norm, by shard; not equal on every rank."""
    local_sums: Tensor
    """FP64: this rank's own losses and counts, before they were summed; not equal on every rank."""


class TrainStep:
    """Runs windows through a parallel model."""

    def __init__(self, model: Transformer, optimizer: DistributedOptimizer, mesh: Mesh) -> None:
        self.model, self.optimizer, self.mesh = model, optimizer, mesh
        self.routers = model.routers()
        modules = model.named_modules()
        self._moe_layers = [name for name, module in modules if isinstance(module, MoE)]
        self._parameters = [name for name, _ in model.named_parameters()]

    def __call__(self, window: list[MicroBatch], lr: float) -> StepOutput:
        """Train on one window.

        :param window: this rank's micro-batches, on the device.
        :param lr: learning rate of this step.
        """
        data_parallel = self.optimizer.data_parallel
        # One divisor for the whole window, fixed before the first backward.
        tokens = torch.stack([micro_batch.num_labelled() for micro_batch in window]).sum()
        collectives.all_reduce(tokens, self.mesh.control, kind="tokens")
        divisor = tokens.clamp(min=1)

        data_parallel.begin_window()
        sums: Tensor | None = None
        for index, micro_batch in enumerate(window):
            data_parallel.begin_microbatch(last=index == len(window) - 1)
            output: ModelOutput = self.model(*micro_batch)
            (output.loss / divisor).backward()
            sums = _pack(output) if sums is None else sums + _pack(output)
        assert sums is not None
        result = self.optimizer.step(lr, sums)
        cross_entropy, logit_z_loss, lb_loss_L, z_loss_L, counts_LE = self._unpack(result.sums)
        update_after_step(self.routers, counts_LE, result.applied)
        return StepOutput(
            tokens,
            result.grad_norm,
            result.applied,
            cross_entropy,
            logit_z_loss,
            lb_loss_L,
            z_loss_L,
            counts_LE,
            self._bias_range(),
            result.squares,
            sums,
        )

    def non_finite_cause(self, output: StepOutput) -> str:
        """Where a skipped step first went wrong; collective. For a message, so it may wait."""
        *_, z_loss_L, _ = self._unpack(output.local_sums)
        in_forward = [
            f"the router of {name}"
            for name, z_loss in zip(self._moe_layers, z_loss_L.tolist(), strict=True)
            if not math.isfinite(z_loss)
        ]
        if not math.isfinite(float(output.local_sums[0])):
            in_forward.append("the cross-entropy")
        finite = output.squares.isfinite().tolist()
        shards = self.optimizer.shards
        bad = {shard.name for shard, fine in zip(shards, finite, strict=True) if not fine}
        # Backward runs from the last parameter to the first.
        in_backward = [name for name in reversed(self._parameters) if name in bad]
        found = collectives.gather_objects((in_forward, in_backward), self.mesh.control)
        for rank, (forward, _) in enumerate(found):
            if forward:
                return f"the first value that is not finite is {forward[0]} on rank {rank}"
        for rank, (_, backward) in enumerate(found):
            if backward:
                return f"the gradient of {backward[0]} is not finite (its shard on rank {rank})"
        return "every rank's gradients are finite, their squares overflow"

    def _bias_range(self) -> Tensor:
        ranges = [router.expert_bias.max() - router.expert_bias.min() for router in self.routers]
        return torch.stack(ranges) if ranges else torch.zeros(0)

    def _unpack(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        layers = len(self.routers)
        cross_entropy, logit_z_loss, rest = sums[0], sums[1], sums[2:]
        lb_loss_L, z_loss_L, counts = rest[:layers], rest[layers : 2 * layers], rest[2 * layers :]
        return (
            cross_entropy,
            logit_z_loss,
            lb_loss_L,
            z_loss_L,
            counts.view(layers, -1) if layers else counts,
        )


def _pack(output: ModelOutput) -> Tensor:
    """The sums of a micro-batch as one FP64 vector, the form in which ranks add them."""
    scalars = torch.stack([output.cross_entropy, output.logit_z_loss])
    parts = (scalars, output.lb_loss_L, output.router_z_loss_L, output.counts_LE.flatten())
    return torch.cat(parts).double()
