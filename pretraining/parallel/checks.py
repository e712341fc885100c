"""Rules across the settings of the mesh, the batch and activation checkpointing, and the engine's support of settings.

Rules that need the number of devices are in mesh.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from pretraining.config.errors import Problem
from pretraining.config.grammar import RECOMPUTABLE, parse_modules, parse_selective
from pretraining.config.support import unsupported
from pretraining.config.training import TrainConfig
from pretraining.config.validate import divisors, either, multiples_around, problem
from pretraining.config.variants import model_shape


def check_engine_support(config: TrainConfig) -> Iterator[Problem]:
    """The engine supports every setting, where the flags say which engine and device will run."""
    device = None if config.device == "auto" else config.device
    if config.engine != "auto" or device:
        yield from unsupported(config, "torch" if config.engine == "auto" else config.engine, device)


def check_tensor_parallel(config: TrainConfig) -> Iterator[Problem]:
    """Every tensor rank computes the same number of heads and feed-forward channels; the vocabulary is padded."""
    ranks, shape = config.tensor_parallel_size, model_shape(config)
    valid = either(divisors(math.gcd(shape.num_attention_heads, shape.intermediate_size)))
    for name in ("num_attention_heads", "intermediate_size"):
        extent = getattr(shape, name)
        if extent % ranks:
            remedy = f"does not divide {name}={extent}; use {valid}; another would need padding with zeros"
            yield problem(config, "tensor_parallel_size", remedy)


def check_kv_replication(config: TrainConfig) -> Iterator[Problem]:
    """Every tensor rank computes the same number of copies of key/value heads."""
    repeats, ranks = config.kv_replication, config.tensor_parallel_size
    if repeats > 1:
        heads = model_shape(config).num_kv_heads
        valid = [r for r in divisors(ranks) if heads * r % ranks == 0]
        if repeats not in valid:
            remedy = f"x num_kv_heads={heads} is not a multiple of tensor_parallel_size={ranks}"
            yield problem(config, "kv_replication", f"{remedy}; use {either(valid)}, or 0 for the smallest")


def check_sequence_split(config: TrainConfig) -> Iterator[Problem]:
    """Context and tensor ranks take the same number of tokens."""
    tensor = config.tensor_parallel_size if config.sequence_parallel else 1
    parts = config.context_parallel_size * tensor
    if config.seq_length % parts:
        factors = [f"context_parallel_size={config.context_parallel_size}"] * (config.context_parallel_size > 1)
        factors += [f"tensor_parallel_size={tensor} (sequence_parallel)"] * (tensor > 1)
        valid = multiples_around(config.seq_length, parts)
        yield problem(config, "seq_length", f"is not a multiple of {' x '.join(factors)}; use {valid}")


def check_batch(config: TrainConfig) -> Iterator[Problem]:
    """The global batch is a multiple of what one device computes; the number of devices comes later."""
    if config.global_batch_size is None:
        return
    micro_batches = config.gradient_accumulation_steps or 1
    factor, total = config.batch_size * micro_batches, config.global_batch_size
    if total % factor:
        product = f"batch_size={config.batch_size}"
        if config.gradient_accumulation_steps:
            product += f" x gradient_accumulation_steps={micro_batches} = {factor}"
        remedy = f"is not a multiple of {product}; use {multiples_around(total, factor)}, or another batch_size"
        yield problem(config, "global_batch_size", remedy)
    else:
        yield from config.batch_problems(total, config.batch_size)


def check_recomputed_blocks(config: TrainConfig) -> Iterator[Problem]:
    """Activation checkpointing recomputes at least one block."""
    layers, choice = config.division.longest, parse_selective(config.selective_checkpointing)
    is_none = choice > layers if isinstance(choice, int) else choice * layers < Fraction(1, 2)
    if config.fsdp_activation_checkpointing and layers and is_none:
        chosen = f"recomputes none of {config.division.longest_text}"
        remedy = f"{chosen}; choose more, or --fsdp_activation_checkpointing=False"
        yield problem(config, "selective_checkpointing", remedy)


def check_recomputed_modules(config: TrainConfig) -> Iterator[Problem]:
    """The settings of what is recomputed within a block agree."""
    selective = config.checkpoint_granularity == "selective"
    if selective and not parse_modules(config.checkpoint_modules):
        remedy = f"needs --checkpoint_modules={','.join(RECOMPUTABLE)}, or some of them"
        yield problem(config, "checkpoint_granularity", remedy)
    if config.checkpoint_num_layers > 1 and (selective or parse_selective(config.selective_checkpointing) != 1):
        remedy = "recomputes whole blocks, every one of them; remove selective_checkpointing and checkpoint_granularity"
        yield problem(config, "checkpoint_num_layers", remedy)


CHECKS = (
    check_engine_support,
    check_tensor_parallel,
    check_kv_replication,
    check_sequence_split,
    check_batch,
    check_recomputed_blocks,
    check_recomputed_modules,
)
