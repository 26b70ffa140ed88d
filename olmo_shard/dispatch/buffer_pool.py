"""Memory for large tensors on a CPU, which is reused when its tensor is freed.

The C allocator returns blocks of many MB to the system. A new block costs one page fault per 4 KiB
when it is first written: 11 ms for 32 MiB, which take 3 ms to copy. (On CUDA torch's own allocator
keeps memory.)
"""

import math
import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

_SLACK = 1.25
"""Largest ratio of the memory that a buffer keeps to the size of its latest tensor."""


class BufferPool:
    """A pool of equally sized buffers that grows to the peak number in use.

    The resident pages of a buffer are those of its tensor and at most a quarter more. Pages that an
    earlier, larger tensor has written are given back. So a layer that receives many rows in one
    step and few in the next does not hold memory.

    :param num_bytes: bytes of the largest tensor.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[_Buffer] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with arbitrary content, whose memory returns to the pool when it is freed."""
        size = math.prod(shape) * dtype.itemsize
        assert size <= self.num_bytes
        # The buffer freed last, whose pages are most likely in the cache.
        buffer = self._free.pop() if self._free else _Buffer(self.num_bytes)
        buffer.resize(size)
        array = np.frombuffer(buffer.memory, dtype=np.uint8)[:size]
        # The tensor's storage holds this array, so the array is freed with the storage.
        weakref.finalize(array, self._free.append, buffer).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)


class _Buffer:
    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, max(1, num_bytes), flags=flags)
        self._touched = 0

    def resize(self, size: int) -> None:
        """Give back the pages written beyond ``size``, if there are enough to be worth a call."""
        if self._touched > _SLACK * size:
            end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            if end < self._touched:
                self.memory.madvise(mmap.MADV_DONTNEED, end)
            self._touched = size
        self._touched = max(self._touched, size)
