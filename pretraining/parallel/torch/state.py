"""This process's shards of the torch engine's tensors, and their descriptions for checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pretraining.models.init import VOCABULARIES
from pretraining.models.llama import Llama
from pretraining.optim.optimizer import moment_shape
from pretraining.optim.rules import MomentSpec
from pretraining.parallel.layout import TorchLayout, shard_dimension
from pretraining.parallel.logical import LogicalTensor

WEIGHT = MomentSpec()  # of a tensor that has every dimension of its parameter


class TorchLogicalTensor(LogicalTensor):
    """A tensor of the unsharded shape without padding, whose bytes here are those of `shard`.

    A DTensor does not serve: DTensor.from_local copies an offloaded shard to the mesh's device, so that a load would
    fill the copy, and it assumes that the vocabulary was split without its rows of padding.
    """

    shard: Tensor
    offsets: tuple[int, ...]

    @staticmethod
    def __new__(
        cls: type[TorchLogicalTensor], shard: Tensor, offsets: tuple[int, ...], shape: torch.Size
    ) -> TorchLogicalTensor:
        """`shard` begins at `offsets` of a tensor of this shape, and may reach beyond its rows."""
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=shard.dtype, device=shard.device)
        made.shard, made.offsets = shard, offsets
        return made

    def _rows(self) -> int:
        """Rows of the shard that are no padding; 0 where it holds nothing else."""
        return max(min(len(self.shard), self.shape[0] - self.offsets[0]), 0)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        sizes = torch.Size((self._rows(), *self.shard.shape[1:]))
        return [ChunkStorageMetadata(torch.Size(self.offsets), sizes)] if sizes.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.shard[: self._rows()]


class LocalShards:
    """This process's shards of a model's parameters, and of tensors that are sharded like them."""

    def __init__(
        self,
        model: Llama,
        shapes: dict[str, torch.Size],
        layout: TorchLayout,
        device_mesh: DeviceMesh | None,
        process_index: int,
    ) -> None:
        """`model` has been sharded; `shapes` are those of all parameters before.

        The shards do not tell: one with a single row is as large as that of a moment which reduces the rows.
        """
        self.weights: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.shapes, self._vocabulary = shapes, model.shape.vocab_size
        self.layout, self.device_mesh = layout, device_mesh
        self.mesh = mesh = layout.grid
        data_rank, self._tensor_rank = divmod(process_index, mesh.tensor)
        self._shard_rank = data_rank % mesh.shard

    def local(self, name: str) -> Tensor:
        """Return this process's shard of a parameter."""
        return to_local(self.weights[name])

    def slice_of(self, name: str, full: Tensor) -> Tensor:
        """Return the slice of an unsharded parameter that this process holds."""
        if (by_tensor := self.layout.tensor_dimension(name)) is not None:
            full = full.chunk(self.mesh.tensor, by_tensor)[self._tensor_rank]
        by_shard = shard_dimension(name) if self.mesh.tensor > 1 else 0
        extent = -(-full.shape[by_shard] // self.mesh.shard)  # of all shards but the last, as torch.chunk cuts
        start = min(self._shard_rank * extent, full.shape[by_shard])
        return full.narrow(by_shard, start, self.local(name).shape[by_shard])

    def offsets(self, name: str, spec: MomentSpec = WEIGHT) -> tuple[int, ...]:
        """Return where this process's shard of a parameter, or of its moment `spec`, begins in the unsharded tensor."""
        full = torch.empty(self.shapes[name], device="meta")
        offset, offsets = self.slice_of(name, full).storage_offset(), []
        for dim, stride in enumerate(full.stride(), -full.dim()):
            offsets.append(0 if dim in spec.reduced_dims else offset // stride)
            offset %= stride
        return tuple(offsets)

    def checkpoint_tensor(self, name: str, shard: Tensor, spec: MomentSpec = WEIGHT) -> Tensor:
        """Describe this process's shard of a parameter, or of its moment `spec`, for a checkpoint: without padding."""
        shape = moment_shape(self.shapes[name], spec)
        if name.split(".")[-2] in VOCABULARIES:
            shape = torch.Size((min(shape[0], self._vocabulary), *shape[1:]))
        if not isinstance(self.weights[name], DTensor) and shard.shape == shape:
            return shard
        return TorchLogicalTensor(shard, self.offsets(name, spec), shape)


def to_local(tensor: Tensor) -> Tensor:
    """Return this process's shard of `tensor`, which shares its memory."""
    shard: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return shard.detach()
