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


class WarmBuffers:
    """Buffers of one size, as many as are in use at one time; only pages once written are resident.

    :param num_bytes: of the largest tensor.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[mmap.mmap] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with arbitrary content, whose memory comes back when nothing refers to it."""
        size = math.prod(shape) * dtype.itemsize
        assert size <= self.num_bytes
        memory = self._free.pop() if self._free else mmap.mmap(-1, max(1, self.num_bytes))
        array = np.frombuffer(memory, dtype=np.uint8)[:size]
        # The tensor's storage holds this array, and the array is freed with it.
        weakref.finalize(array, self._free.append, memory).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)
