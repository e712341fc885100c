"""The arithmetic between devices, batches and the mesh. Touches no device.

Devices form a grid stage x replica x shard x context x tensor: neighbours differ in `tensor`, the axis that
communicates most, and the stages of a pipeline, which communicate least, are farthest apart.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pretraining.config.errors import ConfigError, Problem, counted
from pretraining.config.training import TrainConfig
from pretraining.config.validate import divisors, multiples_around
from pretraining.config.variants import ModelShape

if TYPE_CHECKING:
    import numpy as np

Configuration = TypeVar("Configuration", bound=TrainConfig)


class Mesh(NamedTuple):
    """The devices as a grid whose last axis is the fastest; sharding.py declares what each axis shards."""

    stage: int = 1
    replica: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that get rows of a micro-batch of their own; context and tensor ranks share rows."""
        return self.replica * self.shard


def resolve_mesh(config: TrainConfig, devices: int, linked: int) -> Mesh:
    """Return the mesh of `config` on `devices` devices. Raises ConfigError if a size does not divide them.

    linked: devices with fast links between all of them, those of a host or of a TPU slice.
    """
    stages, context, tensor = config.division.stages, config.context_parallel_size, config.tensor_parallel_size
    ranks = stages * context * tensor
    if devices % ranks:
        raise ConfigError([_model_axes_problem(config, devices)])
    rest = devices // ranks
    if config.sharding_strategy == "ddp":
        return Mesh(stages, rest, 1, context, tensor)
    if config.sharding_strategy != "hsdp":
        return Mesh(stages, 1, rest, context, tensor)
    group = config.sharding_group_size or max(1, min(linked // (context * tensor), rest))
    if rest % group:
        valid = ", ".join(map(str, divisors(rest, rest)))
        of = "" if ranks == 1 else f" / ({' x '.join(_used_axes(config))} = {ranks})"
        remedy = f"does not divide the {counted(devices, 'device')}{of}; use {valid}, or 0 for a host or TPU slice"
        raise ConfigError([Problem(f"--sharding_group_size={group}", remedy)])
    return Mesh(stages, rest // group, group, context, tensor)


def chunks_by_rank(ranks: int) -> list[int]:
    """Return which chunks of a row context ranks have, two each, those of rank 0 first.

    Of C ranks, rank c has chunks c and 2 C - 1 - c of the 2 C chunks, so that causal attention costs all ranks the same
    (Llama 3, Grattafiori et al. 2024, section 3.3.2).
    """
    return [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]


def token_order(length: int, ranks: int) -> np.ndarray:
    """Return the positions of the tokens of a row in the order of chunks_by_rank, int64 [length]."""
    import numpy as np  # here, because the checks of the settings import this module: 0.2 s

    chunks = np.array_split(np.arange(length), 2 * ranks)
    return np.concatenate([chunks[i] for i in chunks_by_rank(ranks)])


def uneven_rows(config: TrainConfig) -> list[int]:
    """Return the lengths of rows that have no two equal chunks for each context rank."""
    ranks = config.context_parallel_size
    return [length for length in config.row_lengths if ranks > 1 and length % (2 * ranks)]


def _used_axes(config: TrainConfig) -> list[str]:
    names = (config.division.setting, "context_parallel_size", "tensor_parallel_size")
    return [name for name in names if name and getattr(config, name) > 1]


def _model_axes_problem(config: TrainConfig, devices: int) -> Problem:
    valid = ", ".join(map(str, divisors(devices, devices)))
    *others, last = [(name, getattr(config, name)) for name in _used_axes(config)]
    if not others:
        return Problem(f"--{last[0]}={last[1]}", f"does not divide the {counted(devices, 'device')}; use {valid}")
    product = math.prod(ranks for _, ranks in (*others, last))
    factors = " x ".join(f"{name}={ranks}" for name, ranks in reversed(others))
    remedy = f"x {factors} = {product} does not divide the {counted(devices, 'device')}; their product can be {valid}"
    return Problem(f"--{last[0]}={last[1]}", remedy)


def kv_repeats(config: TrainConfig, shape: ModelShape) -> int:
    """Return the copies of each KV head along `tensor`: kv_copies, or the least number that divides."""
    automatic = config.tensor_parallel_size // math.gcd(shape.num_kv_heads, config.tensor_parallel_size)
    return config.kv_copies or automatic


def resolve_batch(config: Configuration, ranks: int) -> Configuration:
    """Return `config` with global_batch_size and gradient_accumulation_steps set for this many data-parallel ranks.

    Raises ConfigError with valid values if the global batch is not a whole number of micro-batches on every rank.
    """
    micro_batch = config.batch_size * ranks
    steps, total = config.gradient_accumulation_steps, config.global_batch_size
    if total is None:
        total = micro_batch * (steps or 1)
    if total % micro_batch or (steps is not None and total != micro_batch * steps):
        raise ConfigError([Problem(f"--global_batch_size={total}", _batch_remedy(config, ranks, total, steps))])
    if total // micro_batch % config.division.stages:
        raise ConfigError([Problem(f"--global_batch_size={total}", _groups_remedy(config, micro_batch, total))])
    if problems := list(config.batch_problems(total, micro_batch * config.division.stages)):
        raise ConfigError(problems)
    return replace(config, global_batch_size=total, gradient_accumulation_steps=total // micro_batch)


def _groups_remedy(config: TrainConfig, micro_batch: int, total: int) -> str:
    stages = config.division.stages
    arithmetic = f"is {total // micro_batch} micro-batches of {micro_batch} sequences"
    remedy = f"not a multiple of {config.division.setting}={stages}"
    return f"{arithmetic}, {remedy}; use {multiples_around(total, micro_batch * stages)}, or another batch_size"


def _batch_remedy(config: TrainConfig, ranks: int, total: int, steps: int | None) -> str:
    inner = config.division.stages * config.context_parallel_size * config.tensor_parallel_size
    devices = f"{ranks} devices" if inner == 1 else f"{ranks} data-parallel ranks (of {inner} devices each)"
    arithmetic = f"is not batch_size={config.batch_size} x {devices}"
    if steps is not None:
        return f"{arithmetic} x gradient_accumulation_steps={steps} = {config.batch_size * ranks * steps}; use that"
    least = ranks * config.division.stages
    if total % least:
        return f"{arithmetic} x a whole number; use {multiples_around(total, config.batch_size * least)}"
    valid = ", ".join(map(str, divisors(total // least, total // least)))
    return f"{arithmetic} x a whole number; with it, batch_size can be {valid}"
