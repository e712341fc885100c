"""The dimensions of a model from Hugging Face's config.json, for --model_config_path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretraining.config.errors import ConfigError, Problem
from pretraining.config.flags import field_types
from pretraining.importing.reading import leaves, read_file
from pretraining.importing.rules import (
    Reading,
    Rule,
    Source,
    Table,
    choice,
    ignored,
    mapped,
    no_op,
    refused,
    rests,
    to,
    unless,
)
from pretraining.importing.support import find_rule, nearest, supported


def _scaling(value: Any, source: Source) -> Reading:
    """rope_scaling of transformers 4, rope_parameters of transformers 5: "default" is none."""
    kind = str(value).lower()
    if kind in ("none", "default"):
        return rests("positions as they are")
    if kind not in ("linear", "llama3"):
        return refused("known are linear and llama3")
    return mapped(rope_scaling_type=kind)


_SCALING = {
    "type": Rule(_scaling, ("rope_scaling_type",), "linear, llama3"),
    "rope_type": Rule(_scaling, ("rope_scaling_type",), "linear, llama3"),
    "factor": to("rope_scaling_factor"),
    "low_freq_factor": to("rope_low_freq_factor"),
    "high_freq_factor": to("rope_high_freq_factor"),
    "original_max_position_embeddings": to("rope_original_max_position"),
    "rope_theta": to("rope_theta"),
}


def _window(value: Any, source: Source) -> Reading:
    if source.get("model_type") == "mistral":
        return mapped(sliding_window=value)
    return ignored("read with use_sliding_window")


def _layers(value: Any, _: Source) -> Reading:
    if isinstance(value, list) and set(value) <= {"full_attention"}:
        return rests("full attention in all of them")
    return refused("layers of several kinds")


ABOUT = "nothing of the model's shape"

TABLE = Table(
    "Hugging Face's config.json",
    {
        "model_type": choice(
            {
                **dict.fromkeys(("llama", "mistral"), rests("this model")),
                "qwen3": mapped(qk_norm=True),
            }
        ),
        "sliding_window": Rule(_window, ("sliding_window",), "of Mistral"),
        "use_sliding_window": unless((False,), "windows in some of the layers"),
        "max_window_layers": no_op("read with use_sliding_window"),
        "layer_types": Rule(_layers, (), "full attention in all of them"),
        "hidden_size": to("hidden_size"),
        "intermediate_size": to("intermediate_size"),
        "num_hidden_layers": to("num_layers"),
        "num_attention_heads": to("num_attention_heads"),
        "num_key_value_heads": to("num_kv_heads"),
        "head_dim": to("head_dim"),
        "vocab_size": to("vocab_size"),
        "max_position_embeddings": to("max_position_embeddings"),
        "rms_norm_eps": to("norm_eps"),
        "rope_theta": to("rope_theta"),
        **{f"{group}.{name}": rule for group in ("rope_scaling", "rope_parameters") for name, rule in _SCALING.items()},
        "initializer_range": to("init_std"),
        "tie_word_embeddings": to("tie_word_embeddings"),
        "attention_bias": to("attn_bias"),
        "mlp_bias": to("mlp_bias"),
        "attention_dropout": to("attention_dropout"),
        "hidden_act": choice(
            {name: mapped(activation=gate) for name, gate in (("silu", "swiglu"), ("gelu", "geglu"), ("relu", "reglu"))}
        ),
        "pretraining_tp": unless((1,), "partial products in another order"),
        **{
            name: no_op(ABOUT)
            for name in (
                *("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype"),
                *("transformers_version", "use_cache", "sequence_parallel_enabled", "selective_checkpoint_enabled"),
                *("_*", "attn_implementation", "auto_map"),
            )
        },
    },
    {},
)


def model_config(flags: Mapping[str, object]) -> dict[str, object]:
    """The settings that --model_config_path among `flags` stands for; none without it.

    UserError if the file cannot be read, ConfigError with every key that this recipe cannot follow.
    """
    if not flags.get("model_config_path"):
        return {}
    path = Path(str(flags["model_config_path"]))
    source = Source(dict(leaves(read_file(path))))
    values: dict[str, object] = {"model_variant": "custom"}
    problems = []
    for key, value in source.leaves.items():
        reading = _read(key, value, source)
        if reading.status == "unsupported":
            problems.append(Problem(f"{path}: {key}={value}", reading.note))
        values |= {name: setting for name, setting in reading.values.items() if name in field_types()}
    if problems:
        raise ConfigError(problems)
    return values


def _read(key: str, value: Any, source: Source) -> Reading:
    rule = find_rule(key, TABLE)
    if value is None:
        return ignored("not set")
    if rule is None:
        return refused(f"no such key{nearest(key, TABLE)}")
    return supported(rule.read(value, source))
