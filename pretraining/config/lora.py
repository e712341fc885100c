"""Low-rank adaptation: which parameters are trained, by name alone (Hu et al. 2021; the rules are PEFT's).

Part of the configuration, so that a target that names nothing is reported before torch is imported. Opens no file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pretraining.config.grammar import comma_separated
from pretraining.config.training import SETTINGS, TrainConfig
from pretraining.config.variants import GATED

PROJECTIONS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
IN_BLOCK = (*PROJECTIONS, "self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm")
MODULES = ("model.embed_tokens", "lm_head", "model.norm", *(f"model.layers.0.{name}" for name in IN_BLOCK))
USUAL = "q_proj,v_proj"  # where nothing is said: PEFT's for Llama
# Key of PEFT's adapter_config.json -> setting, and what an absent key means there
PEFT_SETTINGS = {
    **{"r": "lora_rank", "lora_alpha": "lora_alpha", "use_rslora": "lora_use_rslora", "bias": "lora_bias"},
    **{"target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"},
}
PEFT_DEFAULTS: dict[str, Any] = {"r": 8, "lora_alpha": 8, "use_rslora": False, "bias": "none"}
# Keys that say nothing of the function. The dropout is this run's, as its learning rate is.
PEFT_OTHER = (
    *("auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "lora_dropout", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
)
PEFT_INITS = (True, False, None, "gaussian", "orthogonal", "eva")  # others change the base model's weights, too


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of the two small matrices next to a frozen one."""
    return ".lora_" in name


def adapters_alone(config: TrainConfig) -> bool:
    """Whether checkpoints hold what is trained, and no frozen weights."""
    return config.lora_rank > 0 and config.lora_save_mode == "adapter"


def lora_scale(config: TrainConfig) -> float:
    """What the adapter's product is multiplied by: alpha / r, or alpha / sqrt(r) (Kalajdzievski 2023)."""
    return config.lora_alpha / (math.sqrt(config.lora_rank) if config.lora_use_rslora else config.lora_rank)


def adapted(config: TrainConfig) -> list[str]:
    """The projections of a block that have an adapter; none without lora_rank."""
    if not config.lora_rank:
        return []
    return [name for name in projections(config) if matches(name, config.lora_target_modules or USUAL)]


def projections(config: TrainConfig) -> list[str]:
    """The projections of a block of this model."""
    return [name for name in PROJECTIONS if name != "mlp.gate_proj" or config.activation in GATED]


def is_expression(wanted: str) -> bool:
    """Whether targets are given as a regular expression."""
    return re.search(r"[\[\](){}^$*+?|\\]", wanted) is not None


def matches(name: str, wanted: str, layer: int = 0) -> bool:
    """Whether a projection of a layer is meant: by its last parts, or by a regular expression of its path."""
    path = f"model.layers.{layer}.{name}"
    if is_expression(wanted):
        return any(re.fullmatch(wanted, each) for each in (name, path))
    return any(f".{path}".endswith(f".{part}") for part in comma_separated(wanted))


def is_saved(module: str, words: str) -> bool:
    """Whether lora_modules_to_save means a module, by the end of its whole path: norm is every norm of the model, and
    model.norm is the last one."""
    return any(word and module.endswith(word) for word in comma_separated(words))


def is_trained(config: TrainConfig, name: str) -> bool:
    """Whether the parameter of this name takes gradients."""
    if not config.lora_rank or is_adapter(name):
        return True
    module, _, kind = name.rpartition(".")
    if is_saved(module, config.lora_modules_to_save):
        return True
    if kind != "bias":
        return False
    has_adapter = any(module.endswith(target) for target in adapted(config))
    return config.lora_bias == "all" or (config.lora_bias == "lora_only" and has_adapter)


# ---- PEFT's adapter_config.json


def peft_settings(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that an adapter_config.json stands for. Raises ValueError for one of another type."""
    values = {**PEFT_DEFAULTS, **{key: value for key, value in adapter.items() if value is not None}}
    settings = {}
    for key, field in PEFT_SETTINGS.items():
        value = values.get(key, "")
        if key in ("target_modules", "modules_to_save"):
            value = ",".join(PROJECTIONS) if value == "all-linear" else value
            value = ",".join(sorted(map(str, value))) if isinstance(value, list) else value
        value = float(value) if field == "lora_alpha" and type(value) is int else value
        if fault := SETTINGS[field].fault(value):
            raise ValueError(f"{key}={value}: {fault}")
        settings[field] = value
    return settings


def peft_unsupported(adapter: Mapping[str, Any]) -> list[str]:
    """Return the keys of an adapter_config.json with values that this recipe does not have, as "key=value"."""
    known = {*PEFT_SETTINGS, *PEFT_OTHER, "peft_type", "init_lora_weights"}
    keys = [key for key, value in adapter.items() if value and key not in known]
    keys += ["peft_type"] * (adapter.get("peft_type") != "LORA")
    init = adapter.get("init_lora_weights")
    keys += ["init_lora_weights"] * (init not in PEFT_INITS)
    return [f"{key}={adapter.get(key)}" for key in keys]
