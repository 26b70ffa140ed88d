"""One optimizer step: an accumulation window of micro-batches, then the optimizer's phases.

Shape letters: L MoE layers, N ranks of the run, W ranks of the expert-parallel group.

[Note: host reads] The step itself reads no value back to the host, so on a GPU the host runs ahead.
The experts' path may read sizes in each MoE layer, once in forward and once in a recompute:

| path of the rows | what the host reads per layer |
|---|---|
| reference kernels | the plan, the counts of the exchange, the layout of the experts |
| ``rowwise`` on GPUs, no capacity factor | two integers: rows and pairs that arrived |
| ``rowwise`` on GPUs, a capacity factor | nothing |
"""

import math

import torch
from torch import Tensor

from olmo_shard.data.loader import MicroBatch
from olmo_shard.distributed import collectives
from olmo_shard.distributed.comm_stats import StepCommStats, comm_stats
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.nn.protocol import LanguageModel, ModelOutput
from olmo_shard.nn.router import update_after_step
from olmo_shard.optim.sharded import DistributedOptimizer, StepResult
from olmo_shard.optim.spikes import SpikeFilter
from olmo_shard.train.skip_cause import NO_LABEL, non_finite_cause, spike_cause
from olmo_shard.train.step_sums import StepOutput, StepSums


class TrainStep:
    """Trains a parallel model on one window at a time.

    :param model: the model inside of the optimizer's parallel model.
    :param spikes: the filter that skips steps with a spike; ``None`` skips only steps whose
        gradient norm is not finite, or whose batch has no label.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: DistributedOptimizer,
        mesh: Mesh,
        spikes: SpikeFilter | None = None,
    ) -> None:
        self.model, self.optimizer, self.mesh, self.spikes = model, optimizer, mesh, spikes
        self.routers = model.routers()
        self._moe_layers = model.moe_layers()

    def __call__(self, window: list[MicroBatch], lr: float) -> StepOutput:
        """Train on one window; collective.

        :param window: this rank's micro-batches, on the device.
        :param lr: learning rate of this step.
        """
        with comm_stats.measure() as sent:
            return self._run(window, lr, sent)

    def _run(self, window: list[MicroBatch], lr: float, sent: StepCommStats) -> StepOutput:
        # Before the window: one divisor for all its losses, fixed before the first backward.
        tokens = torch.stack([micro_batch.num_labelled() for micro_batch in window]).sum()
        collectives.all_reduce(tokens, self.mesh.control, kind="tokens")

        # Forward and backward; ddp starts to reduce gradients in the last backward.
        local = self._window_sums(window, divisor=tokens.clamp(min=1))

        # The vector that all ranks add in the optimizer's one all-reduce: this rank's sums, and
        # rows and waits by rank. Rows come per rank of the expert-parallel group and are placed by
        # rank of the run first, so they are no part of the sums.
        by_rank_2LN = self._by_rank(local.layers.pop("rows_W", None), sent)
        packed = local.packed()
        limits = torch.full((2,), torch.inf) if self.spikes is None else self.spikes.limits()
        # Phases reduce, norm, step and gather; see [Note: phases] in ``optim/sharded.py``.
        result = self._optimize(lr, torch.cat([packed, by_rank_2LN.flatten()]), tokens)
        global_sums = local.unpacked(result.sums[: len(packed)])
        received_LN, waited_LN = result.sums[len(packed) :].view_as(by_rank_2LN)

        # After the step: expert biases and lagged counts move by the global counts.
        if self.routers:
            update_after_step(self.routers, global_sums.layers["counts_E"], result.applied)
        return StepOutput(
            tokens=tokens,
            grad_norm=result.grad_norm,
            applied=result.applied,
            sums=global_sums,
            bias_range_L=self._bias_range(),
            local_sums=local,
            squares=result.squared_norms,
            limits=limits,
            comm_stats=sent,
            received_LN=received_LN,
            waited_LN=waited_LN,
        )

    def _window_sums(self, window: list[MicroBatch], divisor: Tensor) -> StepSums:
        """Run forward and backward of each micro-batch; returns the sums of the window."""
        parallel_model = self.optimizer.parallel_model
        parallel_model.begin_window()
        sums: list[StepSums] = []
        for index, micro_batch in enumerate(window):
            parallel_model.begin_microbatch(last=index == len(window) - 1)
            output: ModelOutput = self.model(*micro_batch)
            (output.loss / divisor).backward()
            sums.append(StepSums.of(output))
        return sums[0].unpacked(torch.stack([part.packed() for part in sums]).sum(dim=0))

    def _by_rank(self, rows_LW: Tensor | None, sent: StepCommStats) -> Tensor:
        """This rank's part of rows received and seconds waited, by layer and rank: FP64 [2, L, N].

        Seconds are zero on CUDA, where reading them would wait for the device.

        :param rows_LW: rows that this rank sent to each rank of its group; ``None`` for a model
            without MoE layers.
        """
        mesh, layers = self.mesh, self._moe_layers
        # Each rank fills its own entries and leaves zeros elsewhere: the sum over ranks joins them.
        shape = (2, len(layers), mesh.world_size)
        by_rank = torch.zeros(shape, dtype=torch.float64, device=mesh.device)
        if rows_LW is not None:
            # The ranks of an expert-parallel group are consecutive.
            first = mesh.rank - mesh.ep.rank()
            by_rank[0, :, first : first + rows_LW.shape[1]] = rows_LW
        if mesh.device.type == "cpu":
            by_layer = sent.waited_by_layer()
            waits = [by_layer.get(layer.layer, 0.0) for layer in layers]
            by_rank[1, :, mesh.rank] = torch.tensor(waits, dtype=torch.float64)
        return by_rank

    def _optimize(self, lr: float, extra: Tensor, tokens: Tensor) -> StepResult:
        """Run the optimizer's phases. A global batch without a label is skipped."""
        spikes = self.spikes

        def should_apply(grad_norm: Tensor, sums: Tensor) -> Tensor:
            labelled = tokens > 0
            if spikes is None:
                return labelled
            # The first of the sums is the cross-entropy. Its mean over no labels is NaN, which the
            # filter refuses, so such a batch never enters the filter's window.
            return labelled & spikes.should_apply(torch.stack([sums[0] / tokens, grad_norm]))

        return self.optimizer.step(lr, extra, should_apply)

    def _bias_range(self) -> Tensor:
        ranges = [router.expert_bias.max() - router.expert_bias.min() for router in self.routers]
        return torch.stack(ranges) if ranges else torch.zeros(0)

    def skip_cause(self, output: StepOutput) -> str:
        """The reason for a skipped step, for a message; collective. Waits for the device.

        :raises LostPeerError: if a transport has waited for a peer in vain.
        """
        parallel_model = self.optimizer.parallel_model
        parallel_model.raise_if_peer_lost()
        norm = float(output.grad_norm)
        if not math.isfinite(norm):
            layers = {id(layer) for layer in self._moe_layers}
            cause = non_finite_cause(
                output,
                [name for name, module in self.model.named_modules() if id(module) in layers],
                [name for name, _ in self.model.named_parameters()],
                [shard.name for shard in parallel_model.shards()],
                self.mesh.control,
            )
            return f"gradient norm {norm}; {cause}"
        if not int(output.tokens):
            return NO_LABEL
        assert self.spikes is not None
        return spike_cause(output, self.spikes.config)
