"""How one run shards its parameters, gradients and optimizer state: a layout for each engine. Touches no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from pretraining.config.errors import Problem
from pretraining.config.training import TrainConfig
from pretraining.config.validate import multiples_around
from pretraining.config.variants import model_shape
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
    spec_of,
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


class Layout(Protocol):
    """How an engine shards parameters, gradients and optimizer state. Names as in `spec_of`."""

    @property
    def mesh(self) -> Mesh:
        """The devices."""

    @property
    def is_stacked(self) -> bool:
        """Whether one parameter stands for those of all blocks, so that all devices run the same program."""

    def parameter(self, name: str) -> Spec:
        """Return the sharding of a parameter."""

    def gradient(self, name: str) -> Spec:
        """Return the sharding of its gradient between micro-batches."""

    def moment(self, name: str) -> Spec:
        """Return the sharding of its optimizer state."""


class XlaLayout(NamedTuple):
    """The XLA engine's layout: the sharding table on its mesh, as the strategy asks. See Layout."""

    mesh: Mesh
    split: Split
    repeated_heads: bool  # key/value heads that tensor ranks do not divide
    whole_heads: bool  # of which every tensor rank computes all
    sequence_parallel: bool
    table: Callable[..., Spec] = spec_of  # the sharding table
    is_stacked: bool = True

    def parameter(self, name: str) -> Spec:
        """See Layout."""
        return self._spec(name, self.split.parameters)

    def gathered(self, name: str) -> Spec:
        """Return the sharding of a parameter while products read it."""
        return self._spec(name, split=False)

    def gradient(self, name: str) -> Spec:
        """See Layout."""
        return self._spec(name, self.split.gradients)

    def moment(self, name: str) -> Spec:
        """See Layout."""
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
        spec = self.table(name, repeated_heads=self.repeated_heads, tensor_ranks=self.mesh.tensor)
        return on_mesh(spec if split else replicated_along_shard(spec), self.mesh._asdict())


def xla_layout(config: TrainConfig, mesh: Mesh) -> XlaLayout:
    """Return the XLA engine's layout of `config` on `mesh`."""
    shape = model_shape(config)
    repeated = shape.num_kv_heads % mesh.tensor != 0
    unsharded = shape.num_kv_heads * kv_repeats(config, shape) % mesh.tensor != 0
    return XlaLayout(mesh, STRATEGIES[config.sharding_strategy], repeated, unsharded, config.sequence_parallel)


class TorchLayout(NamedTuple):
    """The torch engine's layout: FSDP2 shards dimension 0, or with tensor ranks the dimension that the table names.

    zero1 and zero2 shard parameters too: they differ from fsdp in when FSDP2 gathers, and frees what it gathered.
    """

    mesh: Mesh
    strategy: str
    repeated_heads: bool = False  # key/value heads that tensor ranks do not divide: every rank has all their weights
    table: Callable[..., Spec] = spec_of  # the sharding table
    is_stacked: bool = False

    @property
    def grid(self) -> Mesh:
        """The mesh as FSDP2 sees it: context ranks share parameters as shard ranks do, or with ddp have them all."""
        if self.strategy == "ddp":
            return self.mesh._replace(replica=self.mesh.replica * self.mesh.context, context=1)
        return self.mesh._replace(shard=self.mesh.shard * self.mesh.context, context=1)

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
        """See Layout."""
        axes: list[tuple[str, ...]] = [() for _ in self.table(name)]
        if (by_tensor := self.tensor_dimension(name)) is not None:
            axes[by_tensor] += ("tensor",)
        if self.strategy != "ddp":  # FSDP shards what a tensor rank has
            axes[shard_dimension(name) if self.mesh.tensor > 1 else 0] += SHARD
        return on_mesh(tuple(axes), self.mesh._asdict())

    def gradient(self, name: str) -> Spec:
        """See Layout."""
        spec = self.parameter(name)
        return replicated_along_shard(spec) if self.gathers_once else spec

    def moment(self, name: str) -> Spec:
        """See Layout."""
        return self.parameter(name)

    def tensor_dimension(self, name: str) -> int | None:
        """Return the dimension of a parameter that tensor ranks split; None: each of them has all of it."""
        if self.repeated_heads and fnmatchcase(name, KEYS_AND_VALUES):
            return None
        return next((i for i, axis in enumerate(self.table(name)) if "tensor" in axes_of(axis)), None)


def torch_layout(config: TrainConfig, mesh: Mesh) -> TorchLayout:
    """Return the torch engine's layout of `config` on `mesh`."""
    return TorchLayout(mesh, config.sharding_strategy, model_shape(config).num_kv_heads % mesh.tensor != 0)


def uneven_shards(config: TrainConfig, mesh: Mesh) -> Iterator[Problem]:
    """Yield a problem where the torch engine would have to share columns or tokens unevenly, which it cannot."""
    hidden, shards, chunks = model_shape(config).hidden_size, torch_layout(config, mesh).grid.shard, 2 * mesh.context
    if mesh.tensor > 1 and hidden % shards:
        remedy = f"needs hidden_size={hidden} to be a multiple of the {shards} data-parallel ranks of a group"
        yield Problem(f"--tensor_parallel_size={mesh.tensor}", f"{remedy}; use sharding_strategy=hsdp with fewer")
    for length in uneven_rows(config):
        remedy = f"needs rows of a multiple of {chunks} tokens, and seq_length or a stage of it is {length}"
        yield Problem(f"--context_parallel_size={mesh.context}", f"{remedy}; use {multiples_around(length, chunks)}")


def shard_dimension(name: str) -> int:
    """Return the dimension that FSDP shards where there are tensor ranks: the one the table shards alone, or 0."""
    return next((i for i, axis in enumerate(spec_of(name)) if axis == SHARD), 0)
