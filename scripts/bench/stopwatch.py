"""The time after all work that was queued on the device."""

import time

import torch


def now() -> float:
    """Wait for the device; return the seconds of a clock that only goes forward."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
