"""The interfaces of a symmetric heap: memory of each rank into which its peers write.

    interface   implementation       file
    CpuHeap     SharedMemoryHeap     shared_memory.py      ranks of one host
    GpuHeap     TorchSymmetricHeap   torch_symmetric.py    GPUs of one host with peer access
    GpuHeap     NvshmemHeap          nvshmem.py            GPUs of any number of hosts

Shape letters: W ranks of the group.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor


class CpuHeap(ABC):
    """One arena on each rank of a group, all of one size, zeroed, with 64-bit flags.

    [Note: heap] A *put* is a store into a peer's arena. ``release`` sets one of the peer's flags to
    a value, after it has made all earlier puts of this rank to the peer visible. ``wait`` returns
    when this rank's flags hold the given value; all puts before the flags are then visible here.
    Creating a heap is collective over its group. Closing it is not: a peer that writes late writes
    into memory that no rank reads.

    :ivar rank: this rank in the group.
    :ivar size: number of ranks in the group.
    :ivar arenas: the arenas by rank, uint8, as this process addresses them.
    """

    rank: int
    size: int
    arenas: list[Tensor]

    @abstractmethod
    def release(self, peer: int, flag: int, value: int) -> None:
        """Set a flag of a peer, after all puts to the peer so far."""

    @abstractmethod
    def wait(self, flags: Mapping[int, int], value: int, what: str) -> None:
        """Wait until this rank's flags equal ``value``.

        :param flags: maps each peer to the flag that the peer sets.
        :param what: the exchange that is waited for, for errors.
        :raises LostPeerError: if a peer has ended or does not set its flag in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the arena and the mappings of the peers' arenas. No view may be in use any more."""


class GpuHeap(ABC):
    """One arena on each rank of a group, all of one size, zeroed, with int64 flags.

    Kernels store rows into the arenas of peers and set the peers' flags; the heap only gives the
    addresses. Creating a heap is collective over its group. Closing it is collective as well, since
    memory must not be freed while a peer can still write to it.

    :ivar rank: this rank in the group.
    :ivar size: W, the number of ranks in the group.
    :ivar arena: uint8 [arena_bytes] on the device: this rank's arena.
    :ivar flags: int64 [num_flags] on the device: this rank's flags.
    :ivar arena_ptrs: int64 [W] on the device: the address at which this process's kernels reach
        each rank's arena; 0 for remote ranks.
    :ivar flag_ptrs: int64 [W] on the device: the address of each rank's flags; 0 for remote ranks.
    :ivar remote_ranks: ranks whose arena this rank cannot reach by load and store (another node, or
        no peer access), ascending. Rows for them are packed in ``staging`` and sent from there.
    :ivar staging: uint8 [arena_bytes] on the device, symmetric; ``None`` if no rank of the group is
        remote from another.
    :ivar pes: int32 [W] on the device: the processing element of each rank, for NVSHMEM; ``None``
        on heaps without NVSHMEM.
    :ivar bitcode: path of the device library with which NVSHMEM kernels are linked; ``None`` on
        heaps without NVSHMEM.
    """

    rank: int
    size: int
    arena: Tensor
    flags: Tensor
    arena_ptrs: Tensor
    flag_ptrs: Tensor
    remote_ranks: tuple[int, ...]
    staging: Tensor | None
    pes: Tensor | None
    bitcode: str | None

    @abstractmethod
    def close(self) -> None:
        """Free the memory; collective. No view and no kernel may use the memory any more."""
