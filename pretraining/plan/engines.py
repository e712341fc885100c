"""Where the two engines differ in how a step holds its state: the XLA engine by the sharding table, FSDP2 by rows."""

from __future__ import annotations

from typing import NamedTuple

from pretraining.config.devices import PLAN_KINDS
from pretraining.config.training import TrainConfig
from pretraining.parallel.engine import Mesh
from pretraining.parallel.sharding import Layout, Spec, layout_of, on_mesh, spec_of, whole_along_shard
from pretraining.parallel.torch_tensor import shard_dimension, tensor_dimension


class TorchLayout(NamedTuple):
    """How the torch engine splits everything: along the first dimension, or with tensor ranks as the table says."""

    mesh: Mesh
    frees: bool  # whether a block's gathered parameters go between its forward and its backward pass
    once: bool  # whether parameters are gathered, and gradients scattered, once a step (zero1)

    def parameter(self, name: str) -> Spec:
        """How a parameter is held."""
        along, rank = (shard_dimension(name), tensor_dimension(name)) if self.mesh.tensor > 1 else (0, None)
        split = [(rank, "tensor"), (along, "shard")]  # FSDP what a tensor rank has
        axes = [tuple(axis for dim, axis in split if dim == i) for i in range(len(spec_of(name)))]
        return on_mesh(tuple(axes), self.mesh._asdict())

    def gradient(self, name: str) -> Spec:
        """How its gradient is held between micro-batches: FSDP2 splits all three alike, but with zero1."""
        spec = self.parameter(name)
        return whole_along_shard(spec) if self.once else spec

    def moment(self, name: str) -> Spec:
        """How the optimizer's state of it is held."""
        return self.parameter(name)


def engine_of(config: TrainConfig) -> str:
    """The engine that would run: what was asked for, or what `auto` takes on this kind of device."""
    if config.engine != "auto":
        return config.engine
    return PLAN_KINDS[config.plan_device_kind].engine


def layout_in(config: TrainConfig, mesh: Mesh) -> Layout | TorchLayout:
    """The layout of `config` in its engine."""
    if engine_of(config) == "xla":
        return layout_of(config, mesh)
    strategy = config.sharding_strategy
    return TorchLayout(mesh, mesh.shard > 1 and strategy not in ("zero1", "zero2"), strategy == "zero1")
