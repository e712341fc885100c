"""Low-rank adaptation: which parameters are trained, by name alone (Hu et al. 2021; the rules are PEFT's).

Part of the configuration, so that a target that names nothing is reported before torch is imported.
"""

from __future__ import annotations

import math
import re

from pretraining.config.training import TrainConfig

PROJECTIONS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
MODULES = (*PROJECTIONS, "embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm")
USUAL = "q_proj,v_proj"  # where nothing is said: PEFT's for Llama


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
    return [name for name in PROJECTIONS if matches(name, config.lora_target_modules or USUAL)]


def matches(name: str, wanted: str) -> bool:
    """Whether a module is meant: by its whole name, by its last parts, or by a regular expression of its whole path."""
    if re.search(r"[\[\](){}^$*+?|\\]", wanted):
        return re.fullmatch(wanted, name) is not None or re.fullmatch(wanted, f"model.layers.0.{name}") is not None
    return any(name == part or name.endswith(f".{part}") for part in map(str.strip, wanted.split(",")))


def is_trained(config: TrainConfig, name: str) -> bool:
    """Whether the parameter of this name takes gradients."""
    if not config.lora_rank or is_adapter(name):
        return True
    module, _, kind = name.rpartition(".")
    if config.lora_modules_to_save and matches(module, config.lora_modules_to_save):
        return True
    if kind != "bias":
        return False
    has_adapter = any(module.endswith(target) for target in adapted(config))
    return config.lora_bias == "all" or (config.lora_bias == "lora_only" and has_adapter)
