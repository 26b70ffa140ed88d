"""Memory for tests: poisoned tensors, and tensors that are larger than the machine's memory."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, ``torch.empty`` fills tensors with NaN, and integers with their largest value."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def vast(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in which only written pages take memory."""
    size = torch.Size(shape).numel() * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
