"""A process's part of a matrix whose last rows are padding, as checkpoints see it: without them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class PaddedPart(Tensor):
    """One tensor of the logical state, as torch.distributed.checkpoint's planners take it.

    Only its description, the shape without padding, is a tensor. A DTensor would cut other parts: its rule is that of
    as many rows as it has, and these were cut with the padding.
    """

    held: Tensor
    starts: tuple[int, ...]

    @staticmethod
    def __new__(cls: type[PaddedPart], held: Tensor, starts: tuple[int, ...], shape: torch.Size) -> PaddedPart:
        """`held` begins at `starts` of a tensor of this shape, and may reach beyond its rows."""
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=held.dtype, device=held.device)
        made.held, made.starts = held, starts
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a padded part is only a description")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        rows = min(len(self.held), self.shape[0] - self.starts[0])
        if rows <= 0:  # nothing but padding
            return []
        return [ChunkStorageMetadata(torch.Size(self.starts), torch.Size((rows, *self.held.shape[1:])))]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.held[: self.shape[0] - self.starts[0]]
