"""Rules across the settings of the model and of its adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pretraining.config.errors import Problem
from pretraining.config.grammar import comma_separated
from pretraining.config.lora import MODULES, USUAL, adapted, is_expression, is_saved, matches, projections
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
    elif shape.hidden_size % heads:
        valid = either(divisors(shape.hidden_size))
        remedy = f"does not divide hidden_size={shape.hidden_size}; use {valid}, or set --head_dim"
        yield Problem(f"--num_attention_heads={heads}", remedy)
    elif shape.head_dim % 2:
        remedy = f"and hidden_size={shape.hidden_size} give head_dim={shape.head_dim}, which must be even"
        yield Problem(f"--num_attention_heads={heads}", remedy)


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
            remedy = (
                f"has no effect with position_embedding_type={config.position_embedding_type}; remove one of the two"
            )
            yield problem(config, name, remedy)
    if int(model_shape(config).head_dim * config.rotary_percentage) < 2:
        remedy = f"of head_dim={model_shape(config).head_dim} is less than one pair of channels"
        yield problem(config, "rotary_percentage", remedy)


def check_rope_bands(config: TrainConfig) -> Iterator[Problem]:
    """Llama 3's scaling interpolates between a low and a high frequency."""
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if config.rope_scaling_type == "llama3" and high <= low:
        yield problem(config, "rope_high_freq_factor", f"must be above rope_low_freq_factor={low}")


def check_adapters(config: TrainConfig) -> Iterator[Problem]:
    """The modules that LoRA names exist, and the model has the usual parametrization."""
    if not config.lora_rank:
        return
    if config.mup_base_width:
        remedy = "is for models trained from the start; export the model and train adapters on the export without it"
        yield problem(config, "mup_base_width", remedy)
    yield from _check_targets(config)
    for word in comma_separated(config.lora_modules_to_save):
        meant = [module for module in MODULES if is_saved(module, word)]
        if config.tie_word_embeddings:
            meant = [module for module in meant if module != "lm_head"]
        if not meant:
            remedy = f"contains {word}, which ends the name of no module; the modules are {', '.join(MODULES)}"
            yield problem(config, "lora_modules_to_save", remedy)


def _check_targets(config: TrainConfig) -> Iterator[Problem]:
    """Every word of lora_target_modules names projections, the same in all layers, that are not trained in full."""
    wanted, known = config.lora_target_modules or USUAL, projections(config)
    layers = range(model_shape(config).num_layers if is_expression(wanted) or "layers." in wanted else 1)
    try:
        targets = adapted(config)
        idle = [
            word
            for word in ([wanted] if is_expression(wanted) else comma_separated(wanted))
            if not any(matches(name, word, layer) for layer in layers for name in known)
        ]
    except re.error as error:
        yield problem(config, "lora_target_modules", f"is not a valid regular expression: {error}")
        return
    if idle:
        remedy = f"contains {', '.join(idle)}, which matches no projection; the projections are "
        remedy += ", ".join(name.rpartition(".")[2] for name in known)
        yield problem(config, "lora_target_modules", remedy)
    for name in targets:
        if is_saved(f"model.layers.0.{name}", config.lora_modules_to_save):
            remedy = f"names {name}, which has an adapter; leave it out here or in --lora_target_modules"
            yield problem(config, "lora_modules_to_save", remedy)
    other = (layer for layer in layers if [name for name in known if matches(name, wanted, layer)] != targets)
    if not idle and (layer := next(other, None)) is not None:
        remedy = f"means other projections in layer {layer} than in layer 0; an adapter has the same in all layers"
        yield problem(config, "lora_target_modules", remedy)


CHECKS = (
    check_dimensions_are_set,
    check_heads,
    check_positions,
    check_rotary,
    check_rope_bands,
    check_adapters,
)
