"""Low-rank adaptation: which parameters are trained, by name alone (Hu et al. 2021; the rules are PEFT's).

Imports no torch, so that a target that names nothing is reported before torch is imported. Opens no file.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from pretraining.config.grammar import comma_separated
from pretraining.config.variants import GATED
from pretraining.extensions.projections import PROJECTIONS

if TYPE_CHECKING:
    from pretraining.extensions.lora.settings import LoraConfig

USUAL = "q_proj,v_proj"  # where nothing is said: PEFT's for Llama


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of the two small matrices next to a frozen one."""
    return ".lora_" in name


def lora_scale(config: LoraConfig) -> float:
    """What the adapter's product is multiplied by: alpha / r, or alpha / sqrt(r) (Kalajdzievski 2023)."""
    return config.lora_alpha / (math.sqrt(config.lora_rank) if config.lora_use_rslora else config.lora_rank)


def adapted(config: LoraConfig) -> list[str]:
    """The projections of a block that have an adapter; none without lora_rank."""
    if not config.lora_rank:
        return []
    return [name for name in projections(config) if matches(name, config.lora_target_modules or USUAL)]


def projections(config: LoraConfig) -> list[str]:
    """The projections of a block of this model."""
    return [name for name in PROJECTIONS if name != "mlp.gate_proj" or config.activation in GATED]


def modules(config: LoraConfig) -> list[str]:
    """The modules of this model that can be trained in full, those of a block by their path in it, because they are
    trained in every layer. A tied head is one where the embedding is trained too."""
    is_tied = config.tie_word_embeddings and not is_saved("model.embed_tokens", config.lora_modules_to_save)
    outside = ["model.embed_tokens", *([] if is_tied else ["lm_head"]), "model.norm"]
    norms = ["self_attn.q_norm", "self_attn.k_norm"] if config.qk_norm else []
    norms += ["input_layernorm", *([] if config.shared_norm else ["post_attention_layernorm"])]
    return [*outside, *projections(config), *norms]


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


def is_trained(config: LoraConfig, name: str) -> bool:
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
