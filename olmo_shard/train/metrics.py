"""From the tensors of a step to the record that metrics.jsonl, W&B and the console share."""

import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from olmo_shard.config import Config
from olmo_shard.distributed.comm_stats import StepCommStats
from olmo_shard.nn.flops import flops_per_token
from olmo_shard.nn.peak import peak_flops
from olmo_shard.train.records import Record, perplexity
from olmo_shard.train.state import TrainState
from olmo_shard.train.step import StepOutput


@dataclass(frozen=True, kw_only=True)
class PendingStep:
    """A step whose tensors have not been read yet."""

    step: int
    lr: float
    output: StepOutput


class StepMeter:
    """Times steps and makes their records.

    :param world_size: ranks, for MFU.
    """

    def __init__(self, config: Config, device: torch.device, world_size: int) -> None:
        self.config, self.device = config, device
        self._flops = flops_per_token(config.model, config.data.sequence_length)
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._peak = peak * world_size if peak else None
        layers = range(config.model.n_layers)
        self._moe_layers = [layer for layer in layers if config.model.is_moe_layer(layer)]
        # FSDP2 waits on streams of its own there, which nobody can time from outside.
        self._times_waits = config.parallel.mode == "ddp" or device.type == "cpu"
        self._counts_LE: Tensor | None = None
        """Routes to each expert since the last line of experts.jsonl."""
        self._counted_from = 0
        self.restart()

    def restart(self) -> None:
        """Leave out the time since the last record (evaluation, checkpoint)."""
        self._last = time.perf_counter()

    def record(self, pending: PendingStep, state: TrainState) -> Record:
        """A step's record, from tensors that are ready and a state that counts it already."""
        output = pending.output
        output.comm_stats.resolve_device_counts()
        tokens = int(output.tokens)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        rate = tokens / seconds
        loss = mean_over(tokens, output.sums.cross_entropy)
        self._count_experts(pending.step, output.sums.counts_LE)
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
        """A line of experts.jsonl: routes to each expert since the line before.

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

    def _count_experts(self, step: int, counts_LE: Tensor) -> None:
        if not counts_LE.numel():
            return
        if self._counts_LE is None:
            self._counts_LE, self._counted_from = torch.zeros_like(counts_LE), step
        self._counts_LE += counts_LE

    def _communication(self, comm_stats: StepCommStats) -> Record:
        """Of this rank: bytes sent, and seconds that computation waited for collectives."""
        found: Record = {
            "wire_bytes": comm_stats.bytes.total(),
            "wire_bytes_by_kind": dict(comm_stats.bytes),
            "exposed_seconds": None,
        }
        if self._times_waits:
            seconds = comm_stats.exposed_seconds()
            found["exposed_seconds"] = sum(seconds.values())
            found["exposed_seconds_by_kind"] = seconds
        return found

    def _losses(self, output: StepOutput, tokens: int) -> Record:
        """Auxiliary losses: raw means, and what they add to the objective."""
        model, sums = self.config.model, output.sums
        found: Record = {}
        if model.z_loss_weight:
            found["logit_z_loss"] = mean_over(tokens, sums.logit_z_loss)
        if model.moe is None:
            return found
        router = model.moe.router
        found["router_z_loss"] = mean_over(tokens, sums.router_z_loss_L)
        weighted = router.z_loss_weight * sums.router_z_loss_L.sum()
        found["router_z_loss_weighted"] = mean_over(tokens, weighted)
        if router.lb_loss_weight:  # it is not computed otherwise
            found["lb_loss"] = mean_over(tokens, sums.lb_loss_L)
            weighted = router.lb_loss_weight * sums.lb_loss_L.sum()
            found["lb_loss_weighted"] = mean_over(tokens, weighted)
        return found

    def _dispatch(self, output: StepOutput) -> Record:
        """Per MoE layer: drops; with expert parallelism rows, bytes and waits too."""
        if not self._moe_layers:
            return {}
        found: Record = {"dropped_routes": output.sums.dropped_L.long().tolist()}
        if self.config.parallel.expert_parallel == 1:
            return found
        sent = output.comm_stats.bytes_by_layer
        found["rows_sent"] = output.sums.rows_sent_L.long().tolist()
        found["row_bytes"] = [sent[layer] for layer in self._moe_layers]
        found["received_rows_max"] = output.received_LN.amax(dim=1).long().tolist()
        found["received_rows_mean"] = output.received_LN.mean(dim=1).tolist()
        if self.device.type == "cpu":
            waited_N = output.waited_LN.sum(dim=0)
            found["waited_seconds"] = output.waited_LN.mean(dim=1).tolist()
            found["waited_seconds_max"] = float(waited_N.max())
            found["waited_seconds_min"] = float(waited_N.min())
            found["waited_least_rank"] = int(waited_N.argmin())
        return found


def mean_over(labels: int, total: Tensor) -> Any:
    """Mean of a sum over ``labels`` tokens, as JSON values; ``None`` where there are no labels."""
    return (total / labels).tolist() if labels else None


def _loads(output: StepOutput, tokens: int) -> Record:
    """Per MoE layer: fullest expert against the mean, experts without a token, bias spread."""
    counts_LE = output.sums.counts_LE
    if not counts_LE.numel():
        return {}
    skew_L = counts_LE.amax(dim=1) / counts_LE.mean(dim=1)
    return {
        "load_max_over_mean": skew_L.tolist() if tokens else None,
        "dead_experts": (counts_LE == 0).sum(dim=1).tolist(),
        "expert_bias_range": output.bias_range_L.tolist(),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of the device's allocator, or of this process's resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
