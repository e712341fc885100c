"""What one process of the torch engine holds of every tensor, and what that is of the whole, as checkpoints see it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from pretraining.models.init import VOCABULARIES
from pretraining.models.llama import Llama
from pretraining.parallel.mesh import Mesh
from pretraining.parallel.torch_tensor import own_part, placements


class LogicalTensor(Tensor):
    """One tensor of the logical state, as torch.distributed.checkpoint's planners take it.

    Only its description, the unsharded shape without padding, is a tensor; the bytes are those of `shard`. A DTensor
    does not serve: DTensor.from_local copies an offloaded shard to the mesh's device, so that a load would fill the
    copy, and it assumes that the vocabulary was split without its rows of padding.
    """

    shard: Tensor
    offsets: tuple[int, ...]

    @staticmethod
    def __new__(cls: type[LogicalTensor], shard: Tensor, offsets: tuple[int, ...], shape: torch.Size) -> LogicalTensor:
        """`shard` begins at `offsets` of a tensor of this shape, and may reach beyond its rows."""
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=shard.dtype, device=shard.device)
        made.shard, made.offsets = shard, offsets
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a logical tensor is only a description")

    def _rows(self) -> int:
        """Rows of the shard that are no padding; 0 where it holds nothing else."""
        return max(min(len(self.shard), self.shape[0] - self.offsets[0]), 0)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        sizes = torch.Size((self._rows(), *self.shard.shape[1:]))
        return [ChunkStorageMetadata(torch.Size(self.offsets), sizes)] if sizes.numel() else []

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
        return self.shard[: self._rows()]


class Parts:
    """This process's parts of the parameters of a model, and of whatever is split as they are."""

    def __init__(self, model: Llama, mesh: Mesh, device_mesh: DeviceMesh | None, process_index: int) -> None:
        """`model` is whole still."""
        self.mesh, self._device_mesh = mesh, device_mesh
        above, rank = divmod(process_index, mesh.tensor)
        self._tensor, self._shard = (rank, mesh.tensor), (above % mesh.shard, mesh.shard)
        self.shapes = {name: weight.shape for name, weight in model.named_parameters()}
        self._vocabulary = model.shape.vocab_size

    def take(self, model: Llama) -> None:
        """`model` has been split."""
        self.weights: dict[str, nn.Parameter] = dict(model.named_parameters())

    def own(self, name: str) -> Tensor:
        """What this process holds of a parameter."""
        return local(self.weights[name])

    def of(self, name: str, whole: Tensor) -> Tensor:
        """The part of a `whole` parameter that this process holds."""
        return own_part(whole, name, self.own(name).shape, self._tensor, self._shard)

    def starts(self, name: str, held: Tensor) -> tuple[int, ...]:
        """Where `held`, split as the parameter `name` is, begins in the whole tensor, by dimension."""
        whole = torch.empty(self.shapes[name], device="meta")
        offset, starts = self.of(name, whole).storage_offset(), []
        for stride, extent, mine in zip(whole.stride(), held.shape, self.own(name).shape, strict=True):
            starts.append(offset // stride if extent == mine else 0)
            offset %= stride
        return tuple(starts)

    def saved(self, name: str, held: Tensor) -> Tensor:
        """Describe `held`, which is split as the parameter `name` is, for a checkpoint: without rows of padding."""
        full, own = self.shapes[name], self.own(name).shape
        shape = [extent if mine == size else 1 for extent, mine, size in zip(full, own, held.shape, strict=True)]
        if name.split(".")[-2] in VOCABULARIES:
            shape[0] = min(shape[0], self._vocabulary)
        if not isinstance(self.weights[name], DTensor) and held.shape == torch.Size(shape):
            return held
        return LogicalTensor(held, self.starts(name, held), torch.Size(shape))

    def logical(self, name: str, held: Tensor) -> Tensor:
        """`held` as this process's part of a whole that is split as the parameter `name` is; where that is split and
        `held` has one value for all, it is everybody's."""
        weight, part = self.weights[name], self.own(name)
        if not isinstance(weight, DTensor):
            return held
        mesh, placed = weight.device_mesh, weight.placements
        if self.mesh.tensor > 1:
            assert self._device_mesh is not None
            mesh, placed = self._device_mesh, placements(name)
        sizes = zip(self.shapes[name], part.shape, held.shape, strict=True)
        shape = torch.Size(whole if mine == own else 1 for whole, mine, own in sizes)
        alike = [not isinstance(p, Shard) or part.shape[p.dim] == held.shape[p.dim] for p in placed]
        placed = tuple(p if same else Replicate() for p, same in zip(placed, alike, strict=True))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(held, mesh, placed, run_check=False, shape=shape, stride=stride)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of `tensor`; writing to it writes there."""
    held: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach()
