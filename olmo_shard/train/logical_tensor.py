"""The tensor type that describes a shard to torch's distributed checkpoint (DCP)."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class LogicalTensor(torch.Tensor):
    """This rank's ranges of a flattened logical tensor. It shares memory with the shard.

    DCP calls the methods with double underscores: to plan a save, to plan a load, and to get the
    memory of one range.
    """

    _chunks: tuple[tuple[int, int], ...]
    _global_size: torch.Size

    @staticmethod
    def from_shard(
        local: Tensor, chunks: tuple[tuple[int, int], ...], numel: int
    ) -> "LogicalTensor":
        """Wrap a shard.

        :param local: [n] this rank's elements, the concatenation of the chunks.
        :param chunks: (offset, length) pairs in the flattened logical tensor.
        :param numel: number of elements of the logical tensor.
        """
        tensor = local.detach().as_subclass(LogicalTensor)
        tensor._chunks, tensor._global_size = chunks, torch.Size([numel])
        return tensor

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """Size of the logical tensor, which is the size that DCP saves."""
        return self._global_size if dim is None else self._global_size[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The ranges that this rank reads."""
        return [
            ChunkStorageMetadata(offsets=torch.Size([offset]), sizes=torch.Size([length]))
            for offset, length in self._chunks
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """One write per range."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.dtype),
                    size=self._global_size,
                ),
            )
            for index, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The memory of one range, to read from or to write into."""
        assert index.offset is not None
        # The local tensor is the concatenation of the chunks, in their order.
        start = 0
        for offset, length in self._chunks:
            if offset == index.offset[0]:
                return self.as_subclass(Tensor)[start : start + length]
            start += length
        raise AssertionError(f"no chunk of {index.fqn} starts at {index.offset[0]}")
