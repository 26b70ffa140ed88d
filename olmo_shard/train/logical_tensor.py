"""The tensor type through which torch's distributed checkpoint (DCP) sees a shard."""

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
    """A rank's ranges of a flattened logical tensor; shares memory with the shard."""

    _chunks: tuple[tuple[int, int], ...]
    _global_size: torch.Size

    @staticmethod
    def of(local: Tensor, chunks: tuple[tuple[int, int], ...], numel: int) -> "LogicalTensor":
        tensor = local.detach().as_subclass(LogicalTensor)
        tensor._chunks, tensor._global_size = chunks, torch.Size([numel])
        return tensor

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self._global_size if dim is None else self._global_size[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size([offset]), sizes=torch.Size([length]))
            for offset, length in self._chunks
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
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
        assert index.offset is not None
        start = 0
        for offset, length in self._chunks:
            if offset == index.offset[0]:
                return self.as_subclass(Tensor)[start : start + length]
            start += length
        raise AssertionError(f"no chunk of {index.fqn} starts at {index.offset[0]}")
