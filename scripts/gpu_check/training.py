"""Part d of the GPU check: training steps of a small mixture of experts in both modes.

All steps train on one window of random tokens, so the loss must fall. Both modes start from the
same weights.
"""

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch

from olmo_shard.config import Config, RunConfig
from olmo_shard.distributed.mesh import Mesh, build_mesh
from olmo_shard.distributed.runtime import runtime
from olmo_shard.nn.flops import flops_per_token, parameter_counts
from olmo_shard.nn.peak import peak_flops
from olmo_shard.train.metrics import peak_memory_bytes
from scripts.bench.model import build, random_window
from scripts.bench.stopwatch import now
from scripts.gpu_check.compare import Setup, measurement
from scripts.gpu_check.row import Check, Row

LR = 1e-3
STEPS, WARM = 10, 3
AGREE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Largest relative difference of a step's losses between the modes, by compute type.

In bf16 the modes round gradients at different places. Adam's first steps have the full learning
rate even for small gradients, so rounding errors matter most there.
"""

# 1.02 billion parameters, 0.22 active.
FULL = {
    "model": {
        "vocab_size": 32768,
        "d_model": 1024,
        "n_layers": 12,
        "n_heads": 16,
        "qk_norm": "head",
        "moe": {"num_experts": 32, "top_k": 4, "hidden": 768, "router": {"lb_loss_weight": 0.01}},
    },
    "sequence_length": 2048,
    "micro_batch_tokens": 8192,
    "compute_dtype": "bfloat16",
}
TINY = {
    "model": {
        "vocab_size": 64,
        "d_model": 16,
        "n_layers": 1,
        "n_heads": 2,
        "moe": {"num_experts": 4, "top_k": 2, "hidden": 8, "router": {"lb_loss_weight": 0.01}},
    },
    "sequence_length": 8,
    "micro_batch_tokens": 16,
    "compute_dtype": "float32",
}
Mode = Literal["ddp", "fsdp"]


def checks(setup: Setup) -> Iterator[Check]:
    """Train in each mode, then compare the losses."""
    losses: dict[Mode, list[float]] = {}
    modes: tuple[Mode, ...] = ("ddp", "fsdp")
    for mode in modes:
        yield Check(mode, partial(check_mode, setup, mode, losses))
    yield Check("ddp and fsdp", lambda: [check_agreement(setup, losses)])


def config_of(setup: Setup) -> Config:
    """The config of the run: one rank, two micro-batches per step, Triton kernels."""
    sizes: dict[str, Any] = TINY if setup.tiny else FULL
    return Config.model_validate(
        {
            "run": {"seed": setup.seed, "device": setup.device.type},
            "data": {"sequence_length": sizes["sequence_length"], "sources": [{"path": "none"}]},
            "model": sizes["model"],
            "parallel": {"compute_dtype": sizes["compute_dtype"], "kernels": "triton"},
            "train": {
                "steps": STEPS,
                "micro_batch_tokens": sizes["micro_batch_tokens"],
                "global_batch_tokens": 2 * sizes["micro_batch_tokens"],
            },
        }
    )


def check_mode(setup: Setup, mode: Mode, losses: dict[Mode, list[float]]) -> Iterator[Row]:
    """Train in one mode: falling loss, tokens/s, MFU, peak memory.

    :param losses: takes the losses of this mode.
    """
    config = config_of(setup)
    with runtime(None, RunConfig(device=setup.device.type)) as here:  # type: ignore[arg-type]
        if not setup.tiny:
            torch.cuda.reset_peak_memory_stats()
        losses[mode], seconds = train(config, build_mesh(here), mode, setup.seed)
        memory = peak_memory_bytes(setup.device)
    # Loss.
    tokens = config.train.global_batch_tokens
    rate = tokens / statistics.median(seconds[WARM:] or seconds)
    first, last = losses[mode][0], losses[mode][-1]
    yield Row(
        f"{mode}, loss falls",
        "passed" if last < first else "failed",
        last,
        "nats",
        target=f"< {first:.4f}",
        note=f"first {first:.4f}, last {last:.4f} of {len(seconds)} steps",
    )
    # Speed, from the steps after the warm-up.
    parameters = parameter_counts(config.model).total
    note = f"median of {len(seconds[WARM:])} steps of {tokens} tokens, {parameters:,} parameters"
    yield measurement(setup, f"{mode}, speed", "tokens/s", rate, None, note=note)
    flops = rate * flops_per_token(config.model, config.data.sequence_length)
    peak = None if setup.tiny else peak_flops(torch.cuda.get_device_name(setup.device))
    if peak is None:
        note = "MFU is unknown: the peak rate of this GPU is unknown"
        yield measurement(setup, f"{mode}, model FLOPs", "TFLOP/s", flops / 1e12, None, note=note)
    else:
        yield measurement(setup, f"{mode}, MFU", "%", 100 * flops / peak, None)
    # Memory: bytes per parameter of weights, gradients and optimizer state.
    states = {"ddp": 2 + 4 + 12, "fsdp": 4 + 4 + 8}[mode] * parameters
    note = "predicted: weights, gradients, moments, without activations"
    yield measurement(setup, f"{mode}, peak memory", "GB", memory / 1e9, states / 1e9, note=note)


def train(config: Config, mesh: Mesh, mode: Mode, seed: int) -> tuple[list[float], list[float]]:
    """Losses and seconds of all steps, on random tokens."""
    step = build(config, mesh, {"mode": mode})
    parallel_model = step.optimizer.parallel_model
    assert parallel_model.backend == "triton"
    torch.manual_seed(seed)
    window = random_window(config, mesh, config.num_microbatches(1))
    losses, seconds = [], []
    for _ in range(STEPS):
        begun = now()
        output = step(window, LR)
        parallel_model.wait_for_weights()
        seconds.append(now() - begun)
        assert bool(output.applied), step.skip_cause(output)
        losses.append(float(output.sums.cross_entropy / output.tokens))
    parallel_model.close()
    return losses, seconds


def check_agreement(setup: Setup, losses: dict[Mode, list[float]]) -> Row:
    """Compare the losses of both modes, step by step."""
    name = "ddp and fsdp, same losses"
    if len(losses) < 2:
        return Row(name, "failed", note="a mode has no losses")
    pairs = zip(losses["ddp"], losses["fsdp"], strict=True)
    worst = max(abs(a - b) / abs(a) for a, b in pairs)
    bound = AGREE[config_of(setup).parallel.compute_dtype]
    outcome = "passed" if worst <= bound else "failed"
    note = "largest of all steps"
    return Row(name, outcome, worst, "rel. difference", target=f"<= {bound:g}", note=note)
