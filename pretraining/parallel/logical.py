"""Tensors of the logical state as torch.distributed.checkpoint's planners take them, through its protocol."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class LogicalTensor(Tensor):
    """One tensor of the logical state. Only its description is a tensor; an engine's subclass has this process's bytes.

    A subclass adds `__get_tensor_shard__`, which returns the bytes of a chunk.
    """

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        raise NotImplementedError

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for i, chunk in enumerate(self.__create_chunk_list__())
        ]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a logical tensor is only a description")
