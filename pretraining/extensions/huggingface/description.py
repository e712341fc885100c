"""config.json of Hugging Face's Llama, Mistral, Qwen 2, Qwen 3 and GPT-NeoX as settings: the one place that reads it.

tools/convert/description.py writes it. Mistral is Llama with a sliding window, Qwen 2 is Llama with biases in the
projections of queries, keys and values, Qwen 3 is Llama with normalized queries and keys. An absent key has the default
of transformers 5. Does not depend on torch or transformers, and opens no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from pretraining.config.errors import Problem
from pretraining.config.training import SETTINGS

CONFIG = "config.json"  # file name
GPT_NEOX = "gpt_neox"
# hidden_act -> activation, which is gated there too, but not in GPT-NeoX
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}
PLAIN_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu"}


class Family(NamedTuple):
    """One of transformers' models, in our settings."""

    architecture: str
    fields: Mapping[str, Any]  # settings that all of its models have and that are not Llama's
    options: tuple[str, ...]  # settings that its config.json may turn on
    activations: Mapping[str, str] = ACTIVATIONS


FAMILIES = {
    "llama": Family("LlamaForCausalLM", {}, ("attn_bias", "mlp_bias")),
    "mistral": Family("MistralForCausalLM", {}, ("sliding_window",)),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, ()),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, ("attn_bias",)),
    GPT_NEOX: Family(
        "GPTNeoXForCausalLM",
        {"norm_type": "layernorm", "norm_bias": True, "mlp_bias": True},
        ("attn_bias", "parallel_residual", "rotary_percentage"),
        PLAIN_ACTIVATIONS,
    ),
}


def is_gpt_neox(norm_type: object) -> bool:
    """Return whether a model with these norms is of GPT-NeoX's family, which alone has layer norms."""
    return norm_type == FAMILIES[GPT_NEOX].fields["norm_type"]


# Keys that TrainConfig has under another name or the same: key -> field.
DIMENSIONS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "head_dim": "head_dim",
}
FIELDS = {
    **DIMENSIONS,
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_word_embeddings",
    "attention_bias": "attn_bias",
    "mlp_bias": "mlp_bias",
    "attention_dropout": "attention_dropout",
    "sliding_window": "sliding_window",
    "hidden_dropout": "hidden_dropout",
    "layer_norm_eps": "norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "rotary_percentage",
    "use_parallel_residual": "parallel_residual",
}
# Keys of rope_scaling (transformers 4) and rope_parameters (transformers 5).
ROPE_FIELDS = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_position",
}
ROPE_TYPES = {"default": (), "linear": ("factor",), "llama3": tuple(ROPE_FIELDS)}  # the keys that each must have
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0},
    "mistral": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_key_value_heads": 32},
    "qwen3": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_key_value_heads": 32, "head_dim": 128},
    GPT_NEOX: {
        **{"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_emb_base": 10000.0, "rotary_pct": 0.25},
        **{"attention_bias": True, "use_parallel_residual": True},
    },
}
# Keys that transformers reads for these families alone.
OF_FAMILIES = {
    "attention_bias": ("llama", "qwen3", GPT_NEOX),
    "mlp_bias": ("llama",),
    **dict.fromkeys(("rms_norm_eps", "num_key_value_heads", "rope_theta"), ("llama", "mistral", "qwen2", "qwen3")),
    **dict.fromkeys(("layer_norm_eps", "hidden_dropout", "rotary_emb_base"), (GPT_NEOX,)),
    **dict.fromkeys(("rotary_pct", "use_parallel_residual"), (GPT_NEOX,)),
}
# Values of keys that stand for the only thing that this model does; any other value is refused.
FIXED = {"use_sliding_window": False, "pretraining_tp": 1, "is_causal": True}
# Keys that say nothing of the model's shape or function.
OTHER = (
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "use_cache",
    "max_window_layers",
    "sequence_parallel_enabled",
    "selective_checkpoint_enabled",
    "attn_implementation",
    "auto_map",
    "is_decoder",
    "classifier_dropout",
    "_*",
)


def describes_model(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is Hugging Face's. A run's own one has no model_type."""
    return "model_type" in config


class ModelDescription:
    """The settings that a config.json stands for, the key of each, and what this model cannot follow."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._given = config
        self.fields: dict[str, Any] = {"model_variant": "custom"}
        self.origins: dict[str, str] = {}  # field -> "key=value"
        self.problems: list[Problem] = []  # about "key=value"
        self.unknown: dict[str, Any] = {}  # by key
        family = config.get("model_type", "llama")
        if not isinstance(family, str) or family not in FAMILIES:
            self._refuse("model_type", family, f"supported are {', '.join(FAMILIES)}")
            return
        self.fields |= FAMILIES[family].fields
        for key, value in {**DEFAULTS[family], **config}.items():
            if value is not None:
                self._read(key, value, family)
        if family == GPT_NEOX and not self.problems:
            self._check_heads()

    def _check_heads(self) -> None:
        """Refuse what GPT-NeoX rotates if that is no number of pairs, or a share of another width than its heads'."""
        hidden, heads = (self.fields.get(name) for name in ("hidden_size", "num_attention_heads"))
        if not (hidden and heads):
            return
        width = hidden // heads
        if (given := self.fields.get("head_dim", width)) != width:
            self._refuse("head_dim", given, f"only hidden_size / num_attention_heads = {width} is supported")
        elif (rotated := int(width * self.fields[_PARTIAL_FIELD])) % 2:
            self._refuse("rotary_pct", self.fields[_PARTIAL_FIELD], f"rotates {rotated} channels, which are no pairs")

    def _read(self, key: str, value: Any, family: str) -> None:
        if key == "sliding_window" and family != "mistral":
            return  # without use_sliding_window it has no effect
        if family not in OF_FAMILIES.get(key, FAMILIES):
            self.unknown |= {key: value} if value else {}  # of what is off, nothing is lost
        elif key == "rope_parameters" and self._given.get("rope_scaling"):  # which transformers takes in its place
            self.unknown[key] = value
        elif key in FIELDS:
            self._set(FIELDS[key], key, value)
        elif key == "hidden_act":
            self._choose("activation", key, value, FAMILIES[family].activations)
        elif key in ("rope_scaling", "rope_parameters"):
            self._read_rope(key, value, family)
        elif key == "layer_types":
            if value != ["full_attention"] * (len(value) if isinstance(value, list) else 0):
                self._refuse(key, value, "only layers of full_attention are supported")
        elif key == "quantization_config":
            self._refuse(key, value, "not supported; load it with transformers, and save model.dequantize()")
        elif key in FIXED:
            if value != FIXED[key]:
                self._refuse(key, value, f"only {FIXED[key]} is supported")
        elif key != "model_type" and not any(fnmatchcase(key, pattern) for pattern in OTHER):
            self.unknown[key] = value

    def _read_rope(self, group: str, values: Any, family: str) -> None:
        if not isinstance(values, dict):
            self._refuse(group, values, "expected an object with rope_type and its parameters")
            return
        if nested := [value for value in values.values() if isinstance(value, dict)]:  # by type of layer
            if any(value != nested[0] for value in values.values()):
                self._refuse(group, values, "only the same for all layers is supported")
                return
            values = nested[0]
        kind = values.get("rope_type", values.get("type", "default"))
        if not isinstance(kind, str) or kind not in ROPE_TYPES:
            self._refuse(f"{group}.rope_type", kind, f"supported are {', '.join(ROPE_TYPES)}")
            return
        if kind != "default":
            self.fields["rope_scaling_type"] = kind
            self.origins["rope_scaling_type"] = f"{group}.rope_type={kind}"
        for key in ROPE_TYPES[kind]:
            if values.get(key) is None:
                self._refuse(f"{group}.rope_type", kind, f"needs {group}.{key}")
            else:
                self._set(ROPE_FIELDS[key], f"{group}.{key}", values[key])
        outer, inner = (given.get(_ORIGINAL) for given in (self._given, values))
        if kind == "llama3" and None not in (outer, inner) and outer != inner:
            self._refuse(_ORIGINAL, outer, f"transformers 5 takes it in place of {inner} in {group}; make them equal")
        for key, field in _ROPE_ALWAYS.items():
            if key == _PARTIAL and _PARTIAL_FIELD not in FAMILIES[family].options and values.get(key) not in (None, 1):
                self._refuse(f"{group}.{key}", values[key], f"{FAMILIES[family].architecture} rotates all channels")
            elif values.get(key) is not None:
                self._set(field, f"{group}.{key}", values[key])
        others = values.keys() - ROPE_FIELDS.keys() - _ROPE_ALWAYS.keys() - {"rope_type", "type"}
        self.unknown |= {f"{group}.{key}": values[key] for key in others}

    def _set(self, field: str, key: str, value: Any) -> None:
        if fault := _fault(field, value):
            self._refuse(key, value, fault)
        else:
            self.fields[field] = float(value) if SETTINGS[field].kind is float else value
            self.origins[field] = f"{key}={value}" + ("" if "." in key or key in self._given else " by default")

    def _choose(self, field: str, key: str, value: Any, choices: Mapping[str, str]) -> None:
        if isinstance(value, str) and value in choices:
            self.fields[field], self.origins[field] = choices[value], f"{key}={value}"
        else:
            self._refuse(key, value, f"supported are {', '.join(choices)}")

    def _refuse(self, key: str, value: Any, remedy: str) -> None:
        text = str(value)
        self.problems.append(Problem(f"{key}={text if len(text) < 60 else text[:57] + '...'}", remedy))


_ORIGINAL = "original_max_position_embeddings"
_PARTIAL, _PARTIAL_FIELD = "partial_rotary_factor", "rotary_percentage"  # only GPT-NeoX of transformers follows it
_ROPE_ALWAYS = {"rope_theta": "rope_theta", _PARTIAL: _PARTIAL_FIELD}


def _fault(field: str, value: Any) -> str | None:
    """What is wrong with a value of JSON for this setting; no text is taken for a number."""
    kind = SETTINGS[field].kind
    if type(value) not in ((int, float) if kind is float else (kind,)):
        return {int: "expected a whole number", float: "expected a number", bool: "expected true or false"}[kind]
    if isinstance(value, float) and not math.isfinite(value):
        return "expected a finite number"
    return SETTINGS[field].fault(value)
