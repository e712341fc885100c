"""The arithmetic between devices, batches and the mesh. Touches no device.

Devices form a grid replica x shard x context x tensor: neighbours differ in `tensor`, the axis that communicates most.
Rows of the batch are sharded over replica x shard.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from pretraining.config.errors import ConfigError, Problem
from pretraining.config.training import TrainConfig
from pretraining.config.validate import divisors
from pretraining.config.variants import ModelShape


class Mesh(NamedTuple):
    """The devices as a grid whose last axis is the fastest; sharding.py declares what each axis shards."""

    replica: int
    shard: int
    context: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.replica * self.shard * self.context * self.tensor

    @property
    def data_ranks(self) -> int:
        """Number of ranks that get rows of a global batch of their own; context and tensor ranks share rows."""
        return self.replica * self.shard


def resolve_mesh(config: TrainConfig, devices: int, devices_per_host: int) -> Mesh:
    """Return the mesh of `config` on `devices` devices. Raises ConfigError if a size does not divide them."""
    context, tensor = config.context_parallel_size, config.tensor_parallel_size
    if devices % (context * tensor):
        raise ConfigError([_inner_problem(context, tensor, devices)])
    rest = devices // (context * tensor)
    if config.sharding_strategy == "ddp":
        return Mesh(rest, 1, context, tensor)
    if config.sharding_strategy != "hsdp":
        return Mesh(1, rest, context, tensor)
    group = config.sharding_group_size or max(1, devices_per_host // (context * tensor))
    if rest % group:
        valid = ", ".join(map(str, divisors(rest, rest)))
        of = "" if context * tensor == 1 else f" / (context_parallel_size x tensor_parallel_size = {context * tensor})"
        remedy = f"does not divide the {devices} devices{of}; use {valid}, or 0 for the devices of one host"
        raise ConfigError([Problem(f"--sharding_group_size={group}", remedy)])
    return Mesh(rest // group, group, context, tensor)


def _inner_problem(context: int, tensor: int, devices: int) -> Problem:
    valid = ", ".join(map(str, divisors(devices, devices)))
    if context == 1:
        return Problem(f"--tensor_parallel_size={tensor}", f"does not divide the {devices} devices; use {valid}")
    if tensor == 1:
        return Problem(f"--context_parallel_size={context}", f"does not divide the {devices} devices; use {valid}")
    remedy = f"x context_parallel_size={context} = {context * tensor} does not divide the {devices} devices"
    return Problem(f"--tensor_parallel_size={tensor}", f"{remedy}; their product can be {valid}")


def kv_repeats(config: TrainConfig, shape: ModelShape) -> int:
    """Return the copies of each KV head along `tensor`: kv_replication, or the least number that divides."""
    automatic = config.tensor_parallel_size // math.gcd(shape.num_kv_heads, config.tensor_parallel_size)
    return config.kv_replication or automatic


def resolve_batch(config: TrainConfig, ranks: int) -> TrainConfig:
    """Return `config` with global_batch_size and gradient_accumulation_steps set for this many data-parallel ranks.

    Raises ConfigError with valid values if the global batch is not a whole number of micro-batches on every rank.
    """
    micro_batch = config.batch_size * ranks
    steps, total = config.gradient_accumulation_steps, config.global_batch_size
    if total is None:
        total = micro_batch * (steps or 1)
    if total % micro_batch or (steps is not None and total != micro_batch * steps):
        raise ConfigError([Problem(f"--global_batch_size={total}", _batch_remedy(config, ranks, total, steps))])
    return replace(config, global_batch_size=total, gradient_accumulation_steps=total // micro_batch)


def _batch_remedy(config: TrainConfig, ranks: int, total: int, steps: int | None) -> str:
    inner = config.context_parallel_size * config.tensor_parallel_size
    devices = f"{ranks} devices" if inner == 1 else f"{ranks} data-parallel ranks (of {inner} devices each)"
    arithmetic = f"is not batch_size={config.batch_size} x {devices}"
    if steps is not None:
        return f"{arithmetic} x gradient_accumulation_steps={steps} = {config.batch_size * ranks * steps}"
    if total % ranks:
        near = max(ranks, total // ranks * ranks)
        return f"{arithmetic} x a whole number; use a multiple of {ranks}, such as {near} or {near + ranks}"
    valid = ", ".join(map(str, divisors(total // ranks, total // ranks)))
    return f"{arithmetic} x a whole number; with it, batch_size can be {valid}"


def notes(config: TrainConfig, shape: ModelShape, mesh: Mesh, engine: str) -> list[str]:
    """Return a line for each parallelism setting that has another effect than its name says."""
    lines = []
    if config.sequence_parallel and mesh.tensor == 1:
        lines.append("sequence_parallel: off, because tensor_parallel_size is 1")
    if config.sharding_strategy in ("zero1", "zero2") and mesh.shard * mesh.context == 1:
        lines.append(
            f"sharding_strategy={config.sharding_strategy}: same as ddp, because there is one data-parallel rank"
        )
    elif config.sharding_strategy == "zero2" and engine == "xla" and config.gradient_accumulation_steps == 1:
        lines.append("sharding_strategy=zero2: same as zero1, because there is no gradient accumulation")
    if (repeats := kv_repeats(config, shape)) > 1:
        lines.append(f"kv_replication: {repeats} copies of each of {shape.num_kv_heads} key/value heads are used")
    return lines
