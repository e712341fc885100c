"""PEFT's adapter_config.json as settings. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretraining.config.declaration import settings_of
from pretraining.extensions.lora.settings import LoraConfig
from pretraining.extensions.projections import PROJECTIONS

# Key of PEFT's adapter_config.json -> setting, and what an absent key means there
PEFT_SETTINGS = {
    **{"r": "lora_rank", "lora_alpha": "lora_alpha", "use_rslora": "lora_use_rslora", "bias": "lora_bias"},
    **{"target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"},
}
PEFT_DEFAULTS: dict[str, Any] = {"r": 8, "lora_alpha": 8, "use_rslora": False, "bias": "none"}
# Keys that say nothing of the function. The dropout is this run's, as its learning rate is. Whether an embedding and
# its head are one matrix is seen in the values (adapter.py), which every version of PEFT writes.
PEFT_OTHER = (
    *("auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "lora_dropout", "megatron_core"),
    *("ensure_weight_tying", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
)
PEFT_INITS = (True, False, None, "gaussian", "orthogonal", "eva")  # others change the base model's weights, too


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
        if fault := settings_of(LoraConfig)[field].fault(value):
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
