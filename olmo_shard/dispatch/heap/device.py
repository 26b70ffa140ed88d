"""The interface of a symmetric heap whose memory is addressed by kernels."""

from abc import ABC, abstractmethod

from torch import Tensor


class DeviceHeap(ABC):
    """One arena on each rank of a group, all of one size, zeroed, with int64 flags beside it.

    Kernels store rows into peers' arenas and release their flags; the heap only says where those
    are. Making a heap is collective over its group, and so is closing it: nobody may close while a
    peer can still write.

    :ivar rank: this rank in the group.
    :ivar size: ranks of the group, W.
    :ivar arena: uint8 [arena_bytes] on the device, this rank's.
    :ivar flags: int64 [num_flags] on the device, this rank's.
    :ivar arena_ptrs: int64 [W] on the device: the address at which this process's kernels reach
        each rank's arena; 0 where they cannot store into it (another node, or no peer access).
    :ivar flag_ptrs: int64 [W] on the device: the same of the flags; 0 where ``arena_ptrs`` is.
    :ivar far: ranks whose arena this rank cannot store into, ascending. Rows for them are packed
        in ``staging`` and sent from there.
    :ivar staging: uint8 [arena_bytes] on the device, symmetric; null where no rank of the group is
        far from another.
    :ivar pes: int32 [W] on the device: the processing element of each rank, for NVSHMEM; null on
        heaps without it.
    :ivar bitcode: path of the device library that NVSHMEM kernels link with; null likewise.
    """

    rank: int
    size: int
    arena: Tensor
    flags: Tensor
    arena_ptrs: Tensor
    flag_ptrs: Tensor
    far: tuple[int, ...]
    staging: Tensor | None
    pes: Tensor | None
    bitcode: str | None

    @abstractmethod
    def close(self) -> None:
        """Free the memory; collective, and no view or kernel may use it any more."""
