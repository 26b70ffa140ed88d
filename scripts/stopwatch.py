"""The time, once all that was queued on the device is done."""

import time

import torch


def now() -> float:
    """Seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
