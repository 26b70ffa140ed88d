"""One optimizer step: an accumulation window of micro-batches, then the optimizer's phases.

Nothing here reads a value back to the host. What a MoE layer must know of its sizes is read where
it is needed, in a forward and in its recompute: references read the plan, the counts of an exchange
and the experts' layout, ``rowwise`` on GPUs the numbers of rows and pairs that have arrived, with a
capacity factor nothing. All else is queued.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from olmo_shard.data.loader import MicroBatch
from olmo_shard.distributed import collectives
from olmo_shard.distributed.comm_stats import StepCommStats, comm_stats
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.nn.moe import MoE
from olmo_shard.nn.router import update_after_step
from olmo_shard.nn.transformer import ModelOutput, Transformer
from olmo_shard.optim.sharded import DistributedOptimizer, StepResult
from olmo_shard.optim.spikes import SpikeFilter

NO_LABEL = (
    "no token of the global batch has a label, so there is nothing to learn from: look at the data "
    "of data.sources (with data.document_masking a document of one token has no label)"
)


class StepSums(NamedTuple):
    """FP64 sums over tokens with a label, of a micro-batch, a window or a global batch."""

    cross_entropy: Tensor
    logit_z_loss: Tensor
    lb_loss_L: Tensor
    """Per MoE layer, unweighted."""
    router_z_loss_L: Tensor
    """Per MoE layer, unweighted."""
    counts_LE: Tensor
    """Routes to each expert of each MoE layer."""
    dropped_L: Tensor
    """Routes that capacity dropped in each MoE layer."""
    rows_sent_L: Tensor
    """Rows that each layer's dispatch sent to other ranks, of all tokens."""

    @staticmethod
    def of(output: ModelOutput) -> "StepSums":
        sums = StepSums(
            cross_entropy=output.cross_entropy,
            logit_z_loss=output.logit_z_loss,
            lb_loss_L=output.lb_loss_L,
            router_z_loss_L=output.router_z_loss_L,
            counts_LE=output.counts_LE,
            dropped_L=output.dropped_L,
            rows_sent_L=output.rows_sent_L,
        )
        return StepSums(*(each.double() for each in sums))

    def packed(self) -> Tensor:
        """One vector, the form in which micro-batches and ranks are added."""
        return torch.cat([each.flatten() for each in self])

    def unpacked(self, vector: Tensor) -> "StepSums":
        """Another vector in the shapes of this one."""
        parts = vector.split([each.numel() for each in self])
        shaped = (part.view(each.shape) for part, each in zip(parts, self, strict=True))
        return StepSums(*shaped)


class StepOutput(NamedTuple):
    """Device tensors of one step."""

    tokens: Tensor
    """int64: tokens with a label in the global batch, the divisor of all losses."""
    grad_norm: Tensor
    """FP64, before clipping."""
    applied: Tensor
    """Boolean: false if the step was skipped."""
    sums: StepSums
    """Of the global batch, equal on every rank."""
    bias_range_L: Tensor
    """Largest less smallest expert bias of each MoE layer, after the step."""
    local_sums: StepSums
    """Of this rank alone."""
    squares: Tensor
    """FP64 [shards]: this rank's part of the squared norm, by shard."""
    limits: Tensor
    """FP64 [2]: loss and gradient norm above which the step was to be skipped."""
    comm_stats: StepCommStats
    """What this rank sent and waited for."""
    received_LN: Tensor
    """FP64: rows that each layer's dispatch brought to each rank, its own included."""
    waited_LN: Tensor
    """FP64: seconds that each layer waited on each rank for others' rows; zeros on CUDA."""


class TrainStep:
    """Runs windows through a parallel model.

    :param spikes: skips steps with a spike; null: only those whose norm is not finite.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: DistributedOptimizer,
        mesh: Mesh,
        spikes: SpikeFilter | None = None,
    ) -> None:
        self.model, self.optimizer, self.mesh, self.spikes = model, optimizer, mesh, spikes
        self.routers = model.routers()
        self._moe_layers = {
            name: module.layer for name, module in model.named_modules() if isinstance(module, MoE)
        }
        self._parameters = [name for name, _ in model.named_parameters()]

    def __call__(self, window: list[MicroBatch], lr: float) -> StepOutput:
        """Train on one window.

        :param window: this rank's micro-batches, on the device.
        :param lr: learning rate of this step.
        """
        with comm_stats.measure() as sent:
            return self._run(window, lr, sent)

    def _run(self, window: list[MicroBatch], lr: float, sent: StepCommStats) -> StepOutput:
        parallel_model = self.optimizer.parallel_model
        # One divisor for the whole window, fixed before the first backward.
        tokens = torch.stack([micro_batch.num_labelled() for micro_batch in window]).sum()
        collectives.all_reduce(tokens, self.mesh.control, kind="tokens")
        divisor = tokens.clamp(min=1)

        parallel_model.begin_window()
        window_sums: list[StepSums] = []
        window_rows: list[Tensor] = []
        for index, micro_batch in enumerate(window):
            parallel_model.begin_microbatch(last=index == len(window) - 1)
            output: ModelOutput = self.model(*micro_batch)
            (output.loss / divisor).backward()
            window_sums.append(StepSums.of(output))
            window_rows.append(output.rows_LW)
        like = window_sums[0]
        local = torch.stack([sums.packed() for sums in window_sums]).sum(dim=0)
        rows_LW = torch.stack(window_rows).sum(dim=0)
        limits = torch.full((2,), torch.inf) if self.spikes is None else self.spikes.limits()
        by_rank_2LN = self._by_rank(rows_LW, sent)
        result = self._step(lr, torch.cat([local, by_rank_2LN.flatten()]), tokens)
        global_sums = like.unpacked(result.sums[: len(local)])
        received_LN, waited_LN = result.sums[len(local) :].view_as(by_rank_2LN)
        update_after_step(self.routers, global_sums.counts_LE, result.applied)
        return StepOutput(
            tokens=tokens,
            grad_norm=result.grad_norm,
            applied=result.applied,
            sums=global_sums,
            bias_range_L=self._bias_range(),
            local_sums=like.unpacked(local),
            squares=result.squared_norms,
            limits=limits,
            comm_stats=sent,
            received_LN=received_LN,
            waited_LN=waited_LN,
        )

    def _by_rank(self, rows_LW: Tensor, sent: StepCommStats) -> Tensor:
        """This rank's part of rows received and seconds waited, by layer and rank: [2, L, N].

        Seconds are zero on CUDA, where reading them would wait for the device.
        """
        mesh, layers = self.mesh, list(self._moe_layers.values())
        shape = (2, len(layers), mesh.world_size)
        found = torch.zeros(shape, dtype=torch.float64, device=mesh.device)
        first = mesh.rank - mesh.ep.rank()
        found[0, :, first : first + rows_LW.shape[1]] = rows_LW
        if mesh.device.type == "cpu":
            by_layer = sent.waited_by_layer()
            waits = [by_layer.get(layer, 0.0) for layer in layers]
            found[1, :, mesh.rank] = torch.tensor(waits, dtype=torch.float64)
        return found

    def _step(self, lr: float, extra: Tensor, tokens: Tensor) -> StepResult:
        """Run the optimizer's phases; a global batch without a label is no step."""
        spikes = self.spikes

        def judge(grad_norm: Tensor, sums: Tensor) -> Tensor:
            labelled = tokens > 0
            if spikes is None:
                return labelled
            # The first of the sums is the cross-entropy. Its mean over no labels is NaN, which the
            # filter refuses: such a batch never enters the filter's window.
            return labelled & spikes.should_apply(torch.stack([sums[0] / tokens, grad_norm]))

        return self.optimizer.step(lr, extra, judge)

    def skip_cause(self, output: StepOutput) -> str:
        """Why a step was skipped; collective. For a message, so it may wait.

        :raises LostPeerError: where a transport has waited for a peer in vain.
        """
        self.optimizer.parallel_model.raise_if_peer_lost()
        if not math.isfinite(float(output.grad_norm)):
            return f"gradient norm {float(output.grad_norm)}; {self._non_finite_cause(output)}"
        return self._spike(output) if int(output.tokens) else NO_LABEL

    def _spike(self, output: StepOutput) -> str:
        assert self.spikes is not None
        config = self.spikes.config
        loss = float(output.sums.cross_entropy / output.tokens)
        figures = {"loss": loss, "gradient norm": float(output.grad_norm)}
        above = [
            f"{name} {value:.4g} is above {limit:.4g}"
            for (name, value), limit in zip(figures.items(), output.limits.tolist(), strict=True)
            if not value <= limit
        ]
        rule = f"mean + {config.sigmas:g} standard deviations of the last {config.window} steps"
        return f"{' and '.join(above)}, {rule}"

    def _non_finite_cause(self, output: StepOutput) -> str:
        """Where a value that is not finite first came up."""
        z_loss_L = output.local_sums.router_z_loss_L
        in_forward = [
            f"the router of {name}"
            for name, z_loss in zip(self._moe_layers, z_loss_L.tolist(), strict=True)
            if not math.isfinite(z_loss)
        ]
        if not math.isfinite(float(output.local_sums.cross_entropy)):
            in_forward.append("the cross-entropy")
        finite = output.squares.isfinite().tolist()
        shards = self.optimizer.parallel_model.shards()
        bad = {shard.name for shard, fine in zip(shards, finite, strict=True) if not fine}
        # Backward runs from the last parameter to the first.
        in_backward = [name for name in reversed(self._parameters) if name in bad]
        found = collectives.gather_objects((in_forward, in_backward), self.mesh.control)
        for rank, (forward, _) in enumerate(found):
            if forward:
                return f"the first value that is not finite is {forward[0]} on rank {rank}"
        for rank, (_, backward) in enumerate(found):
            if backward:
                return (
                    f"the gradient of {backward[0]}, summed over the ranks, is not finite (rank "
                    f"{rank} owns that part of the sum; any rank may have brought the value in)"
                )
        return "every rank's gradients are finite, their squares overflow"

    def _bias_range(self) -> Tensor:
        ranges = [router.expert_bias.max() - router.expert_bias.min() for router in self.routers]
        return torch.stack(ranges) if ranges else torch.zeros(0)
