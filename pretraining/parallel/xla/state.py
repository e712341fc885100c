"""Shards of XLA tensors in host memory: created for placement, read for a checkpoint, written back from one.

torch-xla's own save planner silently drops partially replicated tensors (every hsdp parameter), so the tensors passed
to torch.distributed.checkpoint describe their shards themselves, through its checkpointable protocol. Stacked
parameters [layers, ...] appear as one logical tensor per layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from pretraining.parallel.accelerator import HOST
from pretraining.parallel.logical import LogicalTensor
from pretraining.parallel.sharding import Axis, Spec, axes_of

_C = torch_xla._XLAC
Region = tuple[slice, ...]


def local_regions(shape: torch.Size, mesh: xs.Mesh, spec: Spec) -> list[Region]:
    """Return each local device's region of a tensor of this shape, in device order."""
    assert mesh.axis_names is not None
    sizes, grid = dict(zip(mesh.axis_names, mesh.mesh_shape, strict=True)), mesh.get_logical_mesh()
    count, regions = xr.addressable_runtime_device_count(), []
    first = xr.process_index() * count
    for device in range(first, first + count):
        coordinates = (int(where[0]) for where in (grid == device).nonzero())
        position = dict(zip(sizes, coordinates, strict=True))
        cuts = (_shard_slice(extent, axis, sizes, position) for extent, axis in zip(shape, spec, strict=True))
        regions.append(tuple(cuts))
    return regions


def _shard_slice(extent: int, axis: Axis, sizes: dict[str, int], position: dict[str, int]) -> slice:
    shards, index = 1, 0
    for name in axes_of(axis):
        shards, index = shards * sizes[name], index * sizes[name] + position[name]
    width = -(-extent // shards)  # an uneven split pads the last shards
    start = min(index * width, extent)
    return slice(start, min(start + width, extent))


def tensor_from_shards(
    shape: torch.Size, mesh: xs.Mesh, spec: Spec, make: Callable[[list[Region]], list[Tensor]], device: torch.device
) -> Tensor:
    """Return an XLA tensor of this global shape; `make` creates the host tensors of the distinct local regions."""
    regions = local_regions(shape, mesh, spec)
    keys = [tuple((cut.start, cut.stop) for cut in region) for region in regions]
    distinct = dict(zip(keys, regions, strict=True))
    made = dict(zip(distinct, make(list(distinct.values())), strict=True))
    if len({*keys}) == 1 and made[keys[0]].shape == shape:
        tensor = made[keys[0]].to(device)
        xs.mark_sharding(tensor, mesh, (None,) * len(shape))
        return tensor
    widest = tuple(max(made[key].shape[dim] for key in keys) for dim in range(len(shape)))
    shards = [_padded(made[key], widest) for key in keys]
    return _C._global_tensor_from_cpu_shards(shards, mesh.get_op_sharding(spec), shape)


def _padded(shard: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Pad a shard of an uneven split to the size of the largest."""
    if shard.shape == shape:
        return shard
    padded = shard.new_zeros(shape)
    padded[tuple(slice(0, n) for n in shard.shape)] = shard
    return padded


class XlaShards:
    """This process's distinct shards of one XLA tensor, read from the devices at most once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.regions: dict[tuple[int, ...], tuple[int, Region]] = {}  # offsets -> (device index, region)
        self.all_offsets: list[tuple[int, ...]] = []
        self.users = 0  # logical tensors that share the host copy: the layers of a stack
        self._released = 0
        self._host: list[Tensor] | None = None
        for index, (_, cuts) in enumerate(_C._get_local_shard_replica_and_indices([tensor])[0]):
            region = tuple(slice(0, n) for n in self.shape) if cuts is Ellipsis else tuple(cuts)
            offsets = tuple(cut.start for cut in region)
            self.all_offsets.append(offsets)
            self.regions.setdefault(offsets, (index, region))

    def host(self, offsets: tuple[int, ...]) -> Tensor:
        """The shard at these offsets without its padding, in host memory; `put_back` writes it to the devices."""
        if self._host is None:
            self._host = [data for data, _ in _C._get_local_shards([self.tensor])[0]]
        index, region = self.regions[offsets]
        return self._host[index][tuple(slice(0, cut.stop - cut.start) for cut in region)]

    def release(self) -> None:
        """Free the host copy after as many calls as logical tensors share it."""
        self._released += 1
        if self._released >= self.users:
            self._host, self._released = None, 0

    def put_back(self) -> None:
        """Write the host copy, if a load asked for it, to the devices."""
        if self._host is None:
            return
        if len(self.regions) == 1:
            self.tensor.copy_(self._host[0].to(self.tensor.device))
        else:
            devices = [device for _, device in _C._get_local_shards([self.tensor])[0]]
            data = [self._host[self.regions[offsets][0]] for offsets in self.all_offsets]
            _C._load_local_shards(self.tensor, data, devices)
        self._host = None


class XlaLogicalTensor(LogicalTensor):
    """A full XLA tensor, or its first `rows`, or one layer of a stacked one.

    The bytes stay with `shards` until a planner asks for them.
    """

    shards: XlaShards
    layer: int | None
    rows: int | None

    @staticmethod
    def __new__(
        cls: type[XlaLogicalTensor], shards: XlaShards, layer: int | None = None, rows: int | None = None
    ) -> XlaLogicalTensor:
        shape = shards.shape if layer is None else shards.shape[1:]
        shape = shape if rows is None else torch.Size((rows, *shape[1:]))
        description = Tensor._make_wrapper_subclass(cls, shape, dtype=shards.dtype, device=HOST)
        description.shards, description.layer, description.rows = shards, layer, rows
        shards.users += any(map(description._is_in, shards.regions))
        return description

    def _is_in(self, start: tuple[int, ...]) -> bool:
        """Whether the shard at these offsets has the layer; stacks are sharded along their layers by stage."""
        extent = self.shards.regions[start][1][0] if self.shards.shape else slice(0)
        return self.layer is None or extent.start <= self.layer < extent.stop

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunks = []
        for start in filter(self._is_in, sorted(self.shards.regions)):
            region = self.shards.regions[start][1]
            if self.layer is not None:
                region = region[1:]
            if self.rows is not None:
                if start[0] >= self.rows:
                    continue  # nothing but padding
                region = (slice(start[0], min(region[0].stop, self.rows)), *region[1:])
            sizes = torch.Size(cut.stop - cut.start for cut in region)
            chunks.append(ChunkStorageMetadata(torch.Size(cut.start for cut in region), sizes))
        return chunks

    def release(self) -> None:
        """Free the host copy once no layer that shares it needs it."""
        self.shards.release()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offsets = tuple(index.offset or ())
        if self.rows is not None:
            return self.shards.host(offsets)[: self.rows - offsets[0]]
        if self.layer is None:
            return self.shards.host(offsets)
        start = next(start for start in self.shards.regions if start[1:] == offsets and self._is_in(start))
        return self.shards.host(start)[self.layer - start[0]]
