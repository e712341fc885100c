"""The bytes of parameters, gradients and optimizer state that a device holds, as its layout shards them.

The facts printed at the start, the memory check and the plan read them here, so they agree. Touches no device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from pretraining.config.training import TrainConfig
from pretraining.models.init import on_meta
from pretraining.optim.optimizer import build_optimizer, moment_shape
from pretraining.optim.precision import precision_of
from pretraining.parallel.layout import Layout, TorchLayout
from pretraining.parallel.mesh import Mesh
from pretraining.parallel.sharding import Axis, Spec, axes_of, without_single


def shards_along(axis: Axis, mesh: Mapping[str, int]) -> int:
    """Return the number of shards of a dimension in `mesh` (axis -> ranks)."""
    return math.prod(mesh[name] for name in axes_of(axis))


class StateTensor(NamedTuple):
    """The tensors of one name in all blocks: parameters, rounded copies of them, gradients or one optimizer moment."""

    kind: str  # "parameters", "copies", "gradients" or "moments"
    name: str  # of the parameter, with * for the number of the block
    shape: tuple[int, ...]
    tensors: int  # blocks of a stage that have one, or 1
    spec: Spec
    width: int  # bytes per value

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of a device's shard; uneven shards are as large as the largest of them."""
        axes = mesh._asdict()
        return tuple(-(-extent // shards_along(axis, axes)) for extent, axis in zip(self.shape, self.spec, strict=True))


def state_tensors(config: TrainConfig, layout: Layout) -> Iterator[list[StateTensor]]:
    """Yield, stage by stage, the tensors of a device that live from step to step.

    Gradients live from micro-batch to micro-batch. The stages of a stacked model are alike, and are one here.
    """
    everything = list(_state_tensors(config, layout))
    for layers, outer in config.division.shares(layout.mesh.stage, is_stacked=layout.is_stacked):
        is_held = [outer is None or one.name.rpartition(".")[0] in outer for one in everything]
        counts = [
            layers if ".layers." in one.name else int(held) for one, held in zip(everything, is_held, strict=True)
        ]
        yield [tensor._replace(tensors=count) for tensor, count in zip(everything, counts, strict=True) if count]


def _state_tensors(config: TrainConfig, layout: Layout) -> Iterator[StateTensor]:
    """Yield the tensors of a model of one block."""
    precision = precision_of(config)
    model = on_meta(replace(config, num_layers=1))  # blocks are alike: 80 of them take a second to build

    def tensor(kind: str, name: str, shape: Iterable[int], spec: Spec, width: int) -> StateTensor:
        return StateTensor(kind, name.replace(".layers.0.", ".layers.*."), tuple(shape), 1, spec, width)

    for name, weight in model.named_parameters():
        yield tensor("parameters", name, weight.shape, layout.parameter(name), precision.parameters.itemsize)
    for parameter in build_optimizer(config, model.named_parameters()).parameters:
        name, shape = parameter.name, parameter.weight.shape
        if precision.keeps_rounded_copy:
            yield tensor("copies", name, shape, layout.parameter(name), precision.parameters.itemsize)
        yield tensor("gradients", name, shape, layout.gradient(name), precision.gradients.itemsize)
        for moment in parameter.moment_specs().values():
            reduced = moment_shape(shape, moment)
            spec = without_single(layout.moment(name), reduced)
            yield tensor("moments", name, reduced, spec, precision.optimizer_state.itemsize)


def state_bytes(config: TrainConfig, layout: Layout) -> dict[str, int]:
    """Return the bytes of "parameters" (copies included), "gradients" and "moments" on one device, of the stage with
    most of them."""

    def of_stage(tensors: list[StateTensor]) -> dict[str, int]:
        sums: dict[str, int] = {"parameters": 0, "gradients": 0, "moments": 0}
        for tensor in tensors:
            kind = "parameters" if tensor.kind == "copies" else tensor.kind
            sums[kind] += tensor.tensors * math.prod(tensor.local_shape(layout.mesh)) * tensor.width
        return sums

    return max(map(of_stage, state_tensors(config, layout)), key=lambda sums: sum(sums.values()))


def unsharded_state_bytes(config: TrainConfig) -> dict[str, int]:
    """Return the bytes of one unsharded copy of "parameters", "gradients" and "moments"."""
    return state_bytes(config, TorchLayout(Mesh(), config.sharding_strategy))
