"""The arithmetic between devices, batches and the mesh. Touches no device.

Devices are laid out as replica x shard: parameters are split along `shard` and copied along `replica`, and every
device trains on rows of its own.
"""

from __future__ import annotations

from pretraining.config.errors import ConfigError, Problem
from pretraining.config.training import TrainConfig
from pretraining.parallel.engine import Mesh


def divisors(number: int) -> list[int]:
    """All of them, rising."""
    return [d for d in range(1, number + 1) if number % d == 0]


def resolve_mesh(config: TrainConfig, devices: int, devices_per_host: int) -> Mesh:
    """The mesh of `config.sharding_strategy` on `devices` devices. Raises ConfigError if the group does not divide."""
    if config.sharding_strategy == "ddp":
        return Mesh(replica=devices, shard=1)
    if config.sharding_strategy == "fsdp":
        return Mesh(replica=1, shard=devices)
    group = config.sharding_group_size or devices_per_host
    if devices % group:
        valid = ", ".join(map(str, divisors(devices)))
        remedy = f"does not divide the {devices} devices; use {valid}, or 0 for the devices of one host"
        raise ConfigError([Problem(f"--sharding_group_size={group}", remedy)])
    return Mesh(replica=devices // group, shard=group)


def resolve_batch(config: TrainConfig, devices: int) -> None:
    """Fill in `global_batch_size` and `gradient_accumulation_steps` for this many data-parallel devices.

    Raises ConfigError naming what would work if the global batch is not a whole number of passes.
    """
    per_pass = config.batch_size * devices
    steps, total = config.gradient_accumulation_steps, config.global_batch_size
    if total is None:
        config.gradient_accumulation_steps = steps or 1
        config.global_batch_size = per_pass * config.gradient_accumulation_steps
        return
    if total % per_pass or (steps is not None and total != per_pass * steps):
        raise ConfigError([Problem(f"--global_batch_size={total}", _batch_remedy(config, devices, total, steps))])
    config.gradient_accumulation_steps = total // per_pass


def _batch_remedy(config: TrainConfig, devices: int, total: int, steps: int | None) -> str:
    arithmetic = f"is not batch_size={config.batch_size} x {devices} devices"
    if steps is not None:
        return f"{arithmetic} x gradient_accumulation_steps={steps} = {config.batch_size * devices * steps}"
    if total % devices:
        near = max(devices, total // devices * devices)
        return f"{arithmetic} x a whole number; use a multiple of {devices}, such as {near} or {near + devices}"
    valid = ", ".join(map(str, divisors(total // devices)))
    return f"{arithmetic} x a whole number; with it, batch_size can be {valid}"
