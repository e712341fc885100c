"""The dimensions of a model from Hugging Face's config.json, for --model_config_path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretraining.config.errors import Problem
from pretraining.importing.conversions import Conversion, ignored, mapped, unchanged, unsupported
from pretraining.importing.convert import convert
from pretraining.importing.foreign import ForeignConfig
from pretraining.importing.mappings import Format, KeyMapping, choice, ignore, only, to
from pretraining.importing.reading import leaves, read_file


def _scaling(value: Any, source: ForeignConfig) -> Conversion:
    """rope_scaling of transformers 4, rope_parameters of transformers 5: "default" is none."""
    kind = str(value).lower()
    if kind in ("none", "default"):
        return unchanged("positions as they are")
    if kind not in ("linear", "llama3"):
        return unsupported("known are linear and llama3")
    return mapped(rope_scaling_type=kind)


_SCALING = {
    "type": KeyMapping(_scaling, ("rope_scaling_type",), "linear, llama3"),
    "rope_type": KeyMapping(_scaling, ("rope_scaling_type",), "linear, llama3"),
    "factor": to("rope_scaling_factor"),
    "low_freq_factor": to("rope_low_freq_factor"),
    "high_freq_factor": to("rope_high_freq_factor"),
    "original_max_position_embeddings": to("rope_original_max_position"),
    "rope_theta": to("rope_theta"),
}


def _window(value: Any, source: ForeignConfig) -> Conversion:
    if source.get("model_type") == "mistral":
        return mapped(sliding_window=value)
    return ignored("read with use_sliding_window")


def _layers(value: Any, _: ForeignConfig) -> Conversion:
    if isinstance(value, list) and set(value) <= {"full_attention"}:
        return unchanged("full attention in all of them")
    return unsupported("layers of several kinds")


ABOUT = "nothing of the model's shape"

FORMAT = Format(
    "huggingface",
    "Hugging Face's config.json",
    {
        "model_type": choice(
            {
                **dict.fromkeys(("llama", "mistral"), unchanged("this model")),
                "qwen3": mapped(qk_norm=True),
            }
        ),
        "sliding_window": KeyMapping(_window, ("sliding_window",), "of Mistral"),
        "use_sliding_window": only((False,), "windows in some of the layers"),
        "max_window_layers": ignore("read with use_sliding_window"),
        "layer_types": KeyMapping(_layers, (), "full attention in all of them"),
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
        "pretraining_tp": only((1,), "partial products in another order"),
        **{
            name: ignore(ABOUT)
            for name in (
                *("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype"),
                *("transformers_version", "use_cache", "sequence_parallel_enabled", "selective_checkpoint_enabled"),
                *("_*", "attn_implementation", "auto_map"),
            )
        },
    },
)


def model_flags(path: str) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Return the settings in the config.json at `path`, "key=value in FILE" for each, and the problems.

    Nothing where `path` is empty. Raises UserError if the file cannot be read.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[Problem] = []
    if not path:
        return values, origins, problems
    source = ForeignConfig(dict(leaves(read_file(Path(path)))))
    values["model_variant"] = "custom"
    for key, value in source.values.items():
        conversion = _convert(key, value, source)
        if conversion.status == "unsupported":
            problems.append(Problem(f"{path}: {key}={value}", conversion.note))
        else:
            values |= conversion.values
            origins |= dict.fromkeys(conversion.values, f"{key}={value} in {path}")
    return values, origins, problems


def _convert(key: str, value: Any, source: ForeignConfig) -> Conversion:
    mapping = FORMAT.mapping_of(key)
    if value is None:
        return ignored("not set")
    return convert(mapping, value, source) if mapping else unsupported(FORMAT.no_such_key(key))
