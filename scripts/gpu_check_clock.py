"""Times of contenders that take turns on a GPU, and what a roofline predicts for them."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from gpu_check_report import Setup

from olmo_shard.nn.peak import peak_flops

WARM, TURNS = 3, 15
FLUSHED = 256 << 20
"""Bytes written before each run: several times the L2 cache of an H100 (50 MB) or H200."""
BANDWIDTH = {"H200": 4.8e12, "H100 80GB HBM3": 3.35e12}
"""Bytes/s of the card's memory by a part of its name, as the vendor states them (SXM)."""

Contenders = Mapping[str, Callable[[], object]]


def medians(setup: Setup, contenders: Contenders) -> dict[str, float]:
    """Seconds of each, the median over turns in which all run once; L2 is flushed before each."""
    warm, turns, num_bytes = (0, 1, 1) if setup.tiny else (WARM, TURNS, FLUSHED)
    cache = torch.empty(num_bytes, dtype=torch.uint8, device=setup.device)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-warm, turns):
        for name, run in contenders.items():
            cache.zero_()  # and while it does, the host queues what follows
            took = _timed(setup, run)
            if turn >= 0:
                seconds[name].append(took)
    return {name: statistics.median(each) for name, each in seconds.items()}


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
    """Bytes that ``run`` takes at its peak beyond what is allocated before."""
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
    """Dense bf16 FLOP/s of the card; null if it is not known."""
    return None if setup.tiny else peak_flops(torch.cuda.get_device_name(setup.device))


def stated_bandwidth(setup: Setup) -> float | None:
    """Bytes/s of the card's memory; null if it is not known."""
    card = "" if setup.tiny else torch.cuda.get_device_name(setup.device)
    return next((rate for name, rate in BANDWIDTH.items() if name in card), None)


def roofline(flops: float, num_bytes: float, flop_rate: float, byte_rate: float) -> float:
    """Seconds at least, by rates that were measured in the same run."""
    return max(flops / flop_rate, num_bytes / byte_rate)
