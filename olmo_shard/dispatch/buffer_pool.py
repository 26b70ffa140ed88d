"""Memory for large tensors on a CPU that is used again when the tensor that had it is gone.

The C allocator hands blocks of many MB back to the system, and a new one costs a page fault for
every 4 KiB when it is first written: 11 ms for 32 MiB that are copied in 3. (On CUDA torch's own
allocator keeps memory.)
"""

import math
import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

_SLACK = 1.25
"""A buffer keeps at most this many times the memory of its latest tensor."""


class BufferPool:
    """Buffers of one size, as many as are in use at one time.

    Only pages that a tensor covers are resident, and a quarter more: what a larger tensor before it
    has left behind is given back. So a layer that is hot in one step and cold in the next holds no
    memory then.

    :param num_bytes: of the largest tensor.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[_Buffer] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with arbitrary content, whose memory comes back when nothing refers to it."""
        size = math.prod(shape) * dtype.itemsize
        assert size <= self.num_bytes
        buffer = self._free.pop() if self._free else _Buffer(self.num_bytes)
        buffer.resize(size)
        array = np.frombuffer(buffer.memory, dtype=np.uint8)[:size]
        # The tensor's storage holds this array, and the array is freed with it.
        weakref.finalize(array, self._free.append, buffer).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)


class _Buffer:
    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, max(1, num_bytes), flags=flags)
        self._touched = 0

    def resize(self, size: int) -> None:
        """Give back what was touched beyond ``size``, if it is worth a call."""
        if self._touched > _SLACK * size:
            end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            if end < self._touched:
                self.memory.madvise(mmap.MADV_DONTNEED, end)
            self._touched = size
        self._touched = max(self._touched, size)
