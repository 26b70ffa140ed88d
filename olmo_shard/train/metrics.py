"""From the tensors of a step to the record that metrics.jsonl, W&B and the console share.

Shape letters: E experts, L MoE layers, N ranks of the run.
"""

import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from olmo_shard.config import ModelConfig, ParallelConfig
from olmo_shard.distributed.comm_stats import StepCommStats
from olmo_shard.nn.flops import flops_per_token
from olmo_shard.nn.layer_stats import LayerStats
from olmo_shard.nn.peak import peak_flops
from olmo_shard.train.records import Record, perplexity
from olmo_shard.train.state import TrainState
from olmo_shard.train.step_sums import StepOutput


@dataclass(frozen=True, kw_only=True)
class PendingStep:
    """A step whose tensors the host has not read yet."""

    step: int
    """Number of the step, from 1."""
    lr: float
    output: StepOutput


class StepMeter:
    """Times steps and makes their records.

    :param sequence_length: tokens per sequence, for MFU.
    :param world_size: number of ranks, for MFU.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        sequence_length: int,
        device: torch.device,
        world_size: int,
    ) -> None:
        self.model, self.parallel, self.device = model, parallel, device
        self._flops = flops_per_token(model, sequence_length)
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._peak = peak * world_size if peak else None
        self._moe_layers = [layer for layer in range(model.n_layers) if model.is_moe_layer(layer)]
        # On CUDA, FSDP2 waits on streams of its own, and those waits cannot be timed from outside.
        self._times_waits = parallel.mode == "ddp" or device.type == "cpu"
        self._counts_LE: Tensor | None = None
        """Routes to each expert since the last line of experts.jsonl."""
        self._counted_from = 0
        self.restart()

    def restart(self) -> None:
        """Start the clock anew, so that no step contains an evaluation or a checkpoint."""
        self._last = time.perf_counter()

    def record(self, pending: PendingStep, state: TrainState) -> Record:
        """The record of a step; waits for the step.

        :param state: the trainer's state with this step counted.
        """
        output = pending.output
        layers = output.sums.layers
        output.comm_stats.resolve_device_counts()
        # The first read of a tensor waits for the step, so the clock is read after it.
        tokens = int(output.tokens)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        rate = tokens / seconds
        loss = mean_over(tokens, output.sums.cross_entropy)
        self._count_experts(pending.step, layers)
        return {
            "step": pending.step,
            "loss": loss,
            "perplexity": perplexity(loss),
            "grad_norm": float(output.grad_norm),
            "lr": pending.lr,
            "tokens": tokens,
            "tokens_total": state.tokens,
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "mfu": rate * self._flops / self._peak if self._peak else None,
            **self._communication(output.comm_stats),
            "skipped_steps": state.skipped_steps,
            "memory_bytes": peak_memory_bytes(self.device),
            **self._losses(output, tokens),
            **_loads(output, tokens),
            **self._dispatch(output),
        }

    def take_expert_counts(self, step: int) -> Record | None:
        """A line of experts.jsonl: routes to each expert since the previous line.

        :returns: ``None`` for a dense model.
        """
        counts_LE, self._counts_LE = self._counts_LE, None
        if counts_LE is None:
            return None
        return {
            "step": step,
            "first_step": self._counted_from,
            "layers": self._moe_layers,
            "counts": counts_LE.long().tolist(),
        }

    def _count_experts(self, step: int, layers: LayerStats) -> None:
        if "counts_E" not in layers:
            return
        if self._counts_LE is None:
            self._counts_LE, self._counted_from = torch.zeros_like(layers["counts_E"]), step
        self._counts_LE += layers["counts_E"]

    def _communication(self, comm_stats: StepCommStats) -> Record:
        """Bytes that this rank sent, and seconds that its computation waited for collectives."""
        record: Record = {
            "wire_bytes": comm_stats.bytes.total(),
            "wire_bytes_by_kind": dict(comm_stats.bytes),
            "exposed_seconds": None,
        }
        if self._times_waits:
            seconds = comm_stats.exposed_seconds()
            record["exposed_seconds"] = sum(seconds.values())
            record["exposed_seconds_by_kind"] = seconds
        return record

    def _losses(self, output: StepOutput, tokens: int) -> Record:
        """Auxiliary losses: raw means per layer, and their weighted part of the objective."""
        model, layers = self.model, output.sums.layers
        record: Record = {}
        if model.z_loss_weight:
            record["logit_z_loss"] = mean_over(tokens, output.sums.logit_z_loss)
        if model.moe is None:
            return record
        router = model.moe.router
        record["router_z_loss"] = mean_over(tokens, layers["router_z_loss"])
        weighted = router.z_loss_weight * layers["router_z_loss"].sum()
        record["router_z_loss_weighted"] = mean_over(tokens, weighted)
        if router.lb_loss_weight:  # The router computes no balancing loss of weight zero.
            record["lb_loss"] = mean_over(tokens, layers["lb_loss"])
            weighted = router.lb_loss_weight * layers["lb_loss"].sum()
            record["lb_loss_weighted"] = mean_over(tokens, weighted)
        return record

    def _dispatch(self, output: StepOutput) -> Record:
        """Dropped routes per MoE layer; with expert parallelism also rows, bytes and waits."""
        if not self._moe_layers:
            return {}
        layers = output.sums.layers
        record: Record = {"dropped_routes": layers["dropped"].long().tolist()}
        if self.parallel.expert_parallel == 1:
            return record
        sent = output.comm_stats.bytes_by_layer
        record["rows_sent"] = layers["rows_sent"].long().tolist()
        record["row_bytes"] = [sent[layer] for layer in self._moe_layers]
        record["received_rows_max"] = output.received_LN.amax(dim=1).long().tolist()
        record["received_rows_mean"] = output.received_LN.mean(dim=1).tolist()
        if self.device.type == "cpu":
            waited_N = output.waited_LN.sum(dim=0)
            record["waited_seconds"] = output.waited_LN.mean(dim=1).tolist()
            record["waited_seconds_max"] = float(waited_N.max())
            record["waited_seconds_min"] = float(waited_N.min())
            # The slowest rank waits least, since the other ranks wait for it.
            record["waited_least_rank"] = int(waited_N.argmin())
        return record


def mean_over(labels: int, total: Tensor) -> Any:
    """A sum over ``labels`` tokens as a mean, in JSON values; ``None`` if there are no labels."""
    return (total / labels).tolist() if labels else None


def _loads(output: StepOutput, tokens: int) -> Record:
    """Per MoE layer: load of the fullest expert over the mean, unused experts, bias range."""
    counts_LE = output.sums.layers.get("counts_E")
    if counts_LE is None:
        return {}
    skew_L = counts_LE.amax(dim=1) / counts_LE.mean(dim=1)
    return {
        "load_max_over_mean": skew_L.tolist() if tokens else None,
        "dead_experts": (counts_LE == 0).sum(dim=1).tolist(),
        "expert_bias_range": output.bias_range_L.tolist(),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of the device's allocator; on a CPU, of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
