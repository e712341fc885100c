"""Maximal update parametrization: what a model's width changes so that the best learning rate does not depend on it.

Yang et al. 2022, table 8, relative to a base model of width mup_base_width: there, everything is as without it. A
matrix between two widths has entries of standard deviation 1 / sqrt(width) and AdamW steps of 1 / width; embedding,
norms, biases and head have the base model's; logits are divided by the width. Feed-forward width and heads x head_dim
are taken to grow like hidden_size. Depends on names alone, so that both engines, the optimizer and exports agree.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape

MUP_OPTIMIZERS = ("adamw", "muon")
HIDDEN_MATRICES = "model.layers.*_proj.weight"  # map hidden states to hidden states: the projections of the blocks
FINAL_NORM = "model.norm."


def width_ratio(config: TrainConfig) -> float:
    """Return hidden_size / mup_base_width; 1 without mup_base_width."""
    return model_shape(config).hidden_size / config.mup_base_width if config.mup_base_width else 1.0


def is_hidden_matrix(name: str) -> bool:
    """Return whether the parameter of this name is one of HIDDEN_MATRICES."""
    return fnmatchcase(name, HIDDEN_MATRICES)


def initial_scale(config: TrainConfig, name: str) -> float:
    """Return the factor of the base model's initial standard deviation."""
    return 1 / math.sqrt(width_ratio(config)) if is_hidden_matrix(name) else 1.0


def rate_scale(config: TrainConfig, name: str) -> float:
    """Return the factor of a parameter's learning rate; its weight decay per step does not depend on the width.

    Muon's update has the root mean square of AdamW's, but a spectral norm that grows with the square root of the width,
    not with the width (Yang et al. 2023, "A Spectral Condition for Feature Learning").
    """
    if not is_hidden_matrix(name):
        return 1.0
    return 1 / (math.sqrt(width_ratio(config)) if config.optimizer == "muon" else width_ratio(config))


def output_scale(config: TrainConfig) -> float:
    """Return the factor of the final norm's result, and therefore of the logits."""
    return 1 / width_ratio(config)


def query_scale(config: TrainConfig) -> float:
    """Return the factor of the queries: with q k / sqrt(E), attention scores become q k sqrt(base E) / E."""
    return math.sqrt(config.mup_base_head_dim / model_shape(config).head_dim) if config.mup_base_head_dim else 1.0


def folded_scale(config: TrainConfig, name: str) -> float:
    """Return the factor that a parameter takes over in a format without output_scale and query_scale."""
    queries = ".q_norm." if config.qk_norm else ".q_proj."
    if name.startswith(FINAL_NORM):
        return output_scale(config)
    return query_scale(config) if queries in name else 1.0
