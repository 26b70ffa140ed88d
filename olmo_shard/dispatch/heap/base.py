"""The interface of a symmetric heap: memory of each rank that its peers write into."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor


class SymmetricHeap(ABC):
    """One arena on each rank of a group, all of one size, zeroed, with 64-bit flags beside it.

    [Note: heap] A *put* is a store into a peer's arena. ``release`` sets one of the peer's flags to
    a value, and makes all that this rank has put there before visible first. ``wait`` returns once
    the own flags have their values; then all that was put before is visible here. Making a heap is
    collective over its group, closing it is not: a peer that writes late writes into memory that
    nobody reads.

    :ivar rank: this rank in the group.
    :ivar size: ranks of the group.
    :ivar arenas: by rank, the arenas as this process addresses them, uint8.
    """

    rank: int
    size: int
    arenas: list[Tensor]

    @abstractmethod
    def release(self, peer: int, flag: int, value: int) -> None:
        """Set a flag of a peer, after all puts to it so far."""

    @abstractmethod
    def wait(self, flags: Mapping[int, int], value: int, what: str) -> None:
        """Wait until this rank's flags equal ``value``.

        :param flags: by peer, the flag that it sets.
        :param what: that is waited for, for messages.
        :raises LostPeerError: where a peer is gone, or does not set its flag in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the arena and the mappings of the peers'; no view may be in use any more."""
