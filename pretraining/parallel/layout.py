"""How one run shards its parameters, gradients and optimizer state, and the bytes that a device therefore holds.

Each engine owns one layout. The facts printed at the start, the memory check and the plan read it, so they agree.
Touches no device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from pretraining.config.errors import Problem
from pretraining.config.training import TrainConfig
from pretraining.config.validate import multiples_around
from pretraining.config.variants import model_shape
from pretraining.models.init import on_meta
from pretraining.optim.optimizer import build_optimizer, moment_shape
from pretraining.optim.precision import precision_of
from pretraining.parallel.mesh import Mesh, kv_repeats, uneven_rows
from pretraining.parallel.sharding import (
    KEYS,
    SHARD,
    STREAM,
    STREAM_OF_SEQUENCE,
    TOKENS,
    WHOLE_HEADS,
    Activations,
    Spec,
    axes_of,
    on_mesh,
    replicated_along_shard,
    shards_along,
    spec_of,
    without_single,
)

KEYS_AND_VALUES = "*.[kv]_proj.*"
STACK = "model.layers."  # parameters of the XLA engine under it are [layers, ...]


class Split(NamedTuple):
    """Whether a strategy shards a kind of tensor along `shard` and `context`, or replicates it there."""

    parameters: bool
    gradients: bool  # while micro-batches are accumulated
    moments: bool


STRATEGIES = {
    "ddp": Split(parameters=False, gradients=False, moments=False),
    "zero1": Split(parameters=False, gradients=False, moments=True),
    "zero2": Split(parameters=False, gradients=True, moments=True),
    "fsdp": Split(parameters=True, gradients=True, moments=True),
    "hsdp": Split(parameters=True, gradients=True, moments=True),
}


class Layout(NamedTuple):
    """The XLA engine's layout: the sharding table on its mesh, as the strategy asks. Names as in `spec_of`."""

    mesh: Mesh
    split: Split
    repeated_heads: bool  # key/value heads that tensor ranks do not divide
    whole_heads: bool  # of which every tensor rank computes all
    sequence_parallel: bool

    def parameter(self, name: str) -> Spec:
        """Return the sharding of a parameter."""
        return self._spec(name, self.split.parameters)

    def gathered(self, name: str) -> Spec:
        """Return the sharding of a parameter while products read it."""
        return self._spec(name, split=False)

    def gradient(self, name: str) -> Spec:
        """Return the sharding of its gradient between micro-batches."""
        return self._spec(name, self.split.gradients)

    def moment(self, name: str) -> Spec:
        """Return the sharding of its optimizer state."""
        return self._spec(name, self.split.moments)

    def stacked(self, name: str, spec_of: Callable[[str], Spec]) -> Spec:
        """Return the sharding of a parameter of the stacked model, or of its gradient or moment: layers by stage."""
        spec = spec_of(name)
        return (*on_mesh(("stage",), self.mesh._asdict()), *spec) if name.startswith(STACK) else spec

    def stream(self) -> Spec:
        """Return the sharding of the residual stream between blocks, [rows, tokens, hidden]."""
        return self.activation(STREAM_OF_SEQUENCE if self.sequence_parallel else STREAM)

    def activations(self, table: Activations) -> Activations:
        """Return the rows of `table` that must be constrained on this mesh."""
        return table if self.mesh.shard * self.mesh.context * self.mesh.tensor > 1 else ()

    def activation(self, spec: Spec | None) -> Spec:
        """Return a spec of the activations' tables on this mesh."""
        return self.stream() if spec is None else on_mesh(spec, self.mesh._asdict())

    def of_module(self, spec: Spec | None) -> Spec:
        """Return the sharding of an activation that the tables declare for a module."""
        return self.activation(WHOLE_HEADS if spec == KEYS and self.whole_heads else spec)

    def of_gradient(self, spec: Spec | None) -> Spec:
        """Return the sharding of that activation's gradient: where tokens are gathered, it is scattered, and back."""
        if self.sequence_parallel and spec in (None, STREAM):
            return self.activation(STREAM) if spec is None else self.stream()
        if spec == KEYS:
            return self.activation((*TOKENS, *self.of_module(spec)[2:]))
        return self.of_module(spec)

    def _spec(self, name: str, split: bool) -> Spec:
        spec = spec_of(name, repeated_heads=self.repeated_heads, tensor_ranks=self.mesh.tensor)
        return on_mesh(spec if split else replicated_along_shard(spec), self.mesh._asdict())


def layout_of(config: TrainConfig, mesh: Mesh) -> Layout:
    """Return the XLA engine's layout of `config` on `mesh`."""
    shape = model_shape(config)
    repeated = shape.num_kv_heads % mesh.tensor != 0
    whole = shape.num_kv_heads * kv_repeats(config, shape) % mesh.tensor != 0
    return Layout(mesh, STRATEGIES[config.sharding_strategy], repeated, whole, config.sequence_parallel)


class TorchLayout(NamedTuple):
    """The torch engine's layout: FSDP2 shards dimension 0, or with tensor ranks the dimension that the table names.

    zero1 and zero2 shard parameters too: they differ from fsdp in when FSDP2 gathers, and frees what it gathered.
    """

    mesh: Mesh
    strategy: str
    repeated_heads: bool = False  # key/value heads that tensor ranks do not divide: every rank has all their weights

    @property
    def grid(self) -> Mesh:
        """The mesh as FSDP2 sees it: context ranks share parameters as shard ranks do, or with ddp have them all."""
        return self.mesh.fold_context("replica" if self.strategy == "ddp" else "shard")

    @property
    def reshards_after_forward(self) -> bool:
        """Whether a block's gathered parameters are freed between its forward and its backward pass.

        A single shard is the whole parameter: freeing its bf16 copy means casting it twice.
        """
        return self.grid.shard > 1 and self.strategy not in ("zero1", "zero2")

    @property
    def gathers_once(self) -> bool:
        """Whether parameters are gathered, and gradients scattered, once per step instead of per micro-batch."""
        return self.strategy == "zero1"

    def parameter(self, name: str) -> Spec:
        """Return the sharding of a parameter."""
        along, rank = (shard_dimension(name), self.tensor_dimension(name)) if self.mesh.tensor > 1 else (0, None)
        shards = () if self.strategy == "ddp" else SHARD
        split = [(rank, "tensor"), *((along, axis) for axis in shards)]  # FSDP shards what a tensor rank has
        axes = [tuple(axis for dim, axis in split if dim == i) for i in range(len(spec_of(name)))]
        return on_mesh(tuple(axes), self.mesh._asdict())

    def gradient(self, name: str) -> Spec:
        """Return the sharding of its gradient between micro-batches."""
        spec = self.parameter(name)
        return replicated_along_shard(spec) if self.gathers_once else spec

    def moment(self, name: str) -> Spec:
        """Return the sharding of its optimizer state."""
        return self.parameter(name)

    def tensor_dimension(self, name: str) -> int | None:
        """Return the dimension of a parameter that tensor ranks split; None: each of them has all of it."""
        if self.repeated_heads and fnmatchcase(name, KEYS_AND_VALUES):
            return None
        return next((i for i, axis in enumerate(spec_of(name)) if "tensor" in axes_of(axis)), None)


def torch_layout(config: TrainConfig, mesh: Mesh) -> TorchLayout:
    """Return the torch engine's layout of `config` on `mesh`."""
    repeated = model_shape(config).num_kv_heads % mesh.tensor != 0
    return TorchLayout(mesh, config.sharding_strategy, repeated)


def uneven_shards(config: TrainConfig, mesh: Mesh) -> Iterator[Problem]:
    """Yield a problem where the torch engine would have to share columns or tokens unevenly, which it cannot."""
    hidden, shards, chunks = model_shape(config).hidden_size, torch_layout(config, mesh).grid.shard, 2 * mesh.context
    if mesh.tensor > 1 and hidden % shards:
        remedy = f"needs hidden_size={hidden} to be a multiple of the {shards} data-parallel ranks of a group"
        yield Problem(f"--tensor_parallel_size={mesh.tensor}", f"{remedy}; use sharding_strategy=hsdp with fewer")
    for length in uneven_rows(config):
        remedy = f"is not a multiple of {chunks}: two chunks for each of {mesh.context} context ranks"
        yield Problem(f"a row of {length} tokens", f"{remedy}; use {multiples_around(length, chunks)}")


def shard_dimension(name: str) -> int:
    """Return the dimension that FSDP shards where there are tensor ranks: the one the table shards alone, or 0."""
    return next((i for i, axis in enumerate(spec_of(name)) if axis == SHARD), 0)


# ---- Bytes


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


def state_tensors(config: TrainConfig, layout: Layout | TorchLayout) -> Iterator[list[StateTensor]]:
    """Yield, stage by stage, the tensors of a device that live from step to step.

    Gradients live from micro-batch to micro-batch. The stages of the XLA engine are alike, and are one here.
    """
    everything = list(_state_tensors(config, layout))
    for layers, outer in config.division.shares(layout.mesh.stage, is_stacked=isinstance(layout, Layout)):
        is_held = [outer is None or one.name.rpartition(".")[0] in outer for one in everything]
        counts = [
            layers if ".layers." in one.name else int(held) for one, held in zip(everything, is_held, strict=True)
        ]
        yield [tensor._replace(tensors=count) for tensor, count in zip(everything, counts, strict=True) if count]


def _state_tensors(config: TrainConfig, layout: Layout | TorchLayout) -> Iterator[StateTensor]:
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


def state_bytes(config: TrainConfig, layout: Layout | TorchLayout) -> dict[str, int]:
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
