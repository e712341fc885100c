"""Rules across the settings of the model."""

from __future__ import annotations

from collections.abc import Iterator

from pretraining.config.errors import Problem
from pretraining.config.training import SETTINGS, TrainConfig
from pretraining.config.validate import divisors, either, problem
from pretraining.config.variants import missing_dimensions, model_shape


def check_dimensions_are_set(config: TrainConfig) -> Iterator[Problem]:
    """A custom model has no default dimensions."""
    missing = [f"--{name}" for name in missing_dimensions(config)]
    if missing:
        yield Problem("--model_variant=custom", f"needs {', '.join(missing)} too", is_missing=True)


def check_heads(config: TrainConfig) -> Iterator[Problem]:
    """Query heads share key/value heads evenly, and rotary embeddings rotate pairs of channels."""
    shape = model_shape(config)
    heads, kv_heads = shape.num_attention_heads, shape.num_kv_heads
    if heads % kv_heads:
        valid = either(divisors(heads))
        yield Problem(f"--num_kv_heads={kv_heads}", f"does not divide num_attention_heads={heads}; use {valid}")
    if config.head_dim is not None:
        if config.head_dim % 2:
            yield problem(config, "head_dim", "must be even, because rotary embeddings rotate pairs of channels")
    elif (size := shape.hidden_size) % (2 * heads):
        odd = f"and hidden_size={size} give head_dim={shape.head_dim}, which must be even"
        fault = f"does not divide hidden_size={size}" if size % heads else odd
        even = [number for number in divisors(size) if size // number % 2 == 0]
        remedy = f"use {either(even)}, or set --head_dim" if even else "set --head_dim"
        yield Problem(f"--num_attention_heads={heads}", f"{fault}; {remedy}")


def check_positions(config: TrainConfig) -> Iterator[Problem]:
    """The model has a position for every token of a sequence."""
    longest = model_shape(config).max_position_embeddings
    if config.seq_length > longest:
        remedy = f"is above max_position_embeddings={longest}; use at most that, or raise --max_position_embeddings"
        yield problem(config, "seq_length", remedy)


def check_rotary(config: TrainConfig) -> Iterator[Problem]:
    """Rotary settings need rotary embeddings, and at least one pair of channels."""
    for name in ("rotary_percentage", "rope_scaling_type"):
        if config.position_embedding_type != "rope" and getattr(config, name) != SETTINGS[name].default:
            other = f"position_embedding_type={config.position_embedding_type}"
            yield problem(config, name, f"has no effect with {other}; remove one of the two")
    head_dim = model_shape(config).head_dim
    if head_dim > 1 and int(head_dim * config.rotary_percentage) < 2:
        remedy = f"of head_dim={head_dim} is less than one pair of channels; use {-(-2000 // head_dim) / 1000} or more"
        yield problem(config, "rotary_percentage", remedy)


def check_rope_bands(config: TrainConfig) -> Iterator[Problem]:
    """Llama 3's scaling interpolates between a low and a high frequency."""
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if config.rope_scaling_type == "llama3" and high <= low:
        yield problem(config, "rope_high_freq_factor", f"must be above rope_low_freq_factor={low}")


CHECKS = (check_dimensions_are_set, check_heads, check_positions, check_rotary, check_rope_bands)
