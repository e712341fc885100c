"""Updates of rules that need full tensors, on the shards of the torch engine: computed on stacked DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from pretraining.optim.optimizer import ParameterState, moment_shape
from pretraining.optim.rules import Moments, MomentSpec
from pretraining.parallel.layout import shard_dimension
from pretraining.parallel.torch.state import WEIGHT, LocalShards, to_local


def compute_on_full_tensors(
    shards: LocalShards,
    parameters: Sequence[ParameterState],
    gradients: Sequence[Tensor],
    step: Tensor,
    rate: Tensor,
) -> list[tuple[Tensor, Moments]]:
    """Return this process's shards of the new weight and moments of each parameter, in fp32. All of them are alike."""
    first = parameters[0]

    def stack(tensors: Iterable[Tensor], spec: MomentSpec = WEIGHT) -> Tensor:
        named = zip(parameters, tensors, strict=True)
        return torch.stack([as_dtensor(shards, parameter.name, tensor, spec) for parameter, tensor in named])

    specs = first.moment_specs()
    moments = {name: stack((each.moments[name] for each in parameters), specs[name]) for name in first.moments}
    weights = stack(parameter.weight for parameter in parameters)
    nowhere_empty = {name: _without_empty_shards(moment) for name, moment in moments.items()}
    stacked = replace(first, weight=_without_empty_shards(weights), moments=nowhere_empty)
    weight, updated = stacked.compute_update(_without_empty_shards(stack(gradients)), step, rate, on_full)
    device = first.weight.device
    results = [_shards_like(weights, weight, device)]
    results += [_shards_like(moments[name], moment, device) for name, moment in updated.items()]
    return [(weight, dict(zip(updated, values, strict=True))) for weight, *values in zip(*results, strict=True)]


def on_full(function: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """Distribute a stack of matrices, a DTensor [parameters, m, n], over the devices, and the results back.

    Sharded matrices would have 26 collectives each in Muon, and gathered ones would be computed by every device.
    """
    if not isinstance(matrices, DTensor):
        return function(matrices)
    mesh, shape, stride = matrices.device_mesh, matrices.shape, matrices.stride()
    mine = matrices.redistribute(placements=[Shard(0)] * mesh.ndim)
    done = function(mine.to_local()).contiguous()
    results = DTensor.from_local(done, mesh, mine.placements, run_check=False, shape=shape, stride=stride)
    return results.redistribute(placements=matrices.placements)


def as_dtensor(shards: LocalShards, name: str, shard: Tensor, spec: MomentSpec) -> Tensor:
    """Return the DTensor of which `shard` is this process's shard: the parameter `name`, or its moment `spec`.

    It is replicated along dimensions that the parameter shards and the moment reduces.
    """
    weight = shards.weights[name]
    if not isinstance(weight, DTensor):
        return shard
    mesh, placed = weight.device_mesh, weight.placements
    if shards.mesh.tensor > 1:
        assert shards.device_mesh is not None
        dim = shards.layout.tensor_dimension(name)
        mesh = shards.device_mesh
        placed = (Replicate(), Replicate() if dim is None else Shard(dim), Shard(shard_dimension(name)))
    shape = moment_shape(shards.shapes[name], spec)
    reduced = [Shard(len(shape) + dim) for dim in spec.reduced_dims]
    placed = tuple(Replicate() if p in reduced else p for p in placed)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(shard, mesh, placed, run_check=False, shape=shape, stride=stride)


def _without_empty_shards(stack: Tensor) -> Tensor:
    """Return a stack, replicated along dimensions of which a device would have nothing: an empty shard has no maximum.

    So it is with 2 elements on 4 devices, and with 6: they have 2, 2, 2 and 0.
    """
    if not isinstance(stack, DTensor):
        return stack
    extents, placed = list(stack.shape), list(stack.placements)
    for number, each in enumerate(stack.placements):
        if isinstance(each, Shard):
            devices, extent = stack.device_mesh.size(number), extents[each.dim]
            width = -(-extent // devices)
            if width * (devices - 1) < extent:
                extents[each.dim] = width
            else:
                placed[number] = Replicate()
    return stack.redistribute(placements=placed)


def _shards_like(old: Any, new: Tensor, device: torch.device) -> Sequence[Tensor]:
    """Local shards of the stack `new` in the placements of `old`, on `device`, where the optimizer state is.

    DTensors are on the mesh's device also where the shards are offloaded.
    """
    shards = new.redistribute(placements=old.placements) if isinstance(new, DTensor) else new
    return to_local(shards).to(device).unbind()
