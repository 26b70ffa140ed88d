"""Times of variants on a GPU, the peak rates of GPUs, and rooflines."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from olmo_shard.nn.peak import peak_flops
from scripts.gpu_check.compare import Setup

WARM_UP, ROUNDS = 3, 15
FLUSHED = 256 << 20
"""Bytes that are written before each run, to evict the L2 cache (50 MB on an H100 or H200)."""
BANDWIDTH = {"H200": 4.8e12, "H100 80GB HBM3": 3.35e12}
"""Memory bandwidth in bytes/s by a part of the GPU's name, as the vendor states it (SXM)."""

Variants = Mapping[str, Callable[[], object]]
"""Name to function, for functions that are compared with each other."""


def medians(setup: Setup, variants: Variants) -> dict[str, float]:
    """Median seconds per variant, over rounds in which each variant runs once."""
    warm_up, rounds, num_bytes = (0, 1, 1) if setup.tiny else (WARM_UP, ROUNDS, FLUSHED)
    cache = torch.empty(num_bytes, dtype=torch.uint8, device=setup.device)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(-warm_up, rounds):
        for name, run in variants.items():
            cache.zero_()  # evicts the cache, and lets the host queue the kernels that follow
            elapsed = _timed(setup, run)
            if round_ >= 0:
                seconds[name].append(elapsed)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _timed(setup: Setup, run: Callable[[], object]) -> float:
    if setup.tiny:
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def peak_memory(setup: Setup, run: Callable[[], object]) -> int:
    """Peak memory of ``run`` in bytes, beyond the memory that was allocated before."""
    if setup.tiny:
        run()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def stated_flops(setup: Setup) -> float | None:
    """Dense bf16 FLOP/s that the vendor states; ``None`` for an unknown GPU."""
    return None if setup.tiny else peak_flops(torch.cuda.get_device_name(setup.device))


def stated_bandwidth(setup: Setup) -> float | None:
    """Memory bandwidth in bytes/s that the vendor states; ``None`` for an unknown GPU."""
    gpu = "" if setup.tiny else torch.cuda.get_device_name(setup.device)
    return next((rate for name, rate in BANDWIDTH.items() if name in gpu), None)


def roofline(flops: float, num_bytes: float, flop_rate: float, byte_rate: float) -> float:
    """Shortest possible time in seconds, at rates that were measured in the same run."""
    return max(flops / flop_rate, num_bytes / byte_rate)
