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
        """`held`, split as the parameter `name` is, as a checkpoint has it: no rows of padding."""
        whole, own = self.shapes[name], self.own(name).shape
        padded = name.split(".")[-2] in VOCABULARIES and whole[0] > self._vocabulary and held.shape[0] == own[0]
        if not padded:
            return self.logical(name, held)
        columns = whole[1] if held.shape[1] == own[1] else 1
        return PaddedPart(held, self.starts(name, held), torch.Size((self._vocabulary, columns)))

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
