"""Maximal update parametrization: what a model's width changes so that the best learning rate does not depend on it.

Yang et al. 2022, table 8, relative to a base model of width mup_base_width: there, everything is as without it. A
matrix between two widths has entries of standard deviation 1 / sqrt(width) and AdamW steps of 1 / width; embedding,
norms, biases and head have the base model's; logits are divided by the width. Feed-forward width and heads x head_dim
are taken to grow like hidden_size. Depends on names alone, so that both engines, the optimizer and exports agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pretraining.config.declaration import AtLeast, Needs, Resume
from pretraining.config.errors import Problem
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem
from pretraining.config.variants import model_shape
from pretraining.extensions.projections import is_hidden_matrix

OPTIMIZERS = ("adamw", "muon")
SETTINGS = ["mup_base_width", "mup_base_head_dim"]
FINAL_NORM = "model.norm."


@dataclass(frozen=True)
class MupConfig(TrainConfig):
    """A configuration with a base model."""

    # ---- Model
    mup_base_width: Annotated[int, AtLeast(0, below=2**20), Resume.FUNCTION] = 0
    """Maximal update parametrization (Yang et al. 2022, table 8): hidden_size of the base model, whose learning rate is
    then the best one for every width, too. With m = hidden_size / mup_base_width, the matrices of the blocks start with
    1 / sqrt(m) of the base model's standard deviation and have 1 / m of the learning rate (muon: 1 / sqrt(m)), and the
    logits are divided by m. Weight decay per step is the base model's. intermediate_size and the number of heads, or
    head_dim, must grow like hidden_size. 0: the usual parametrization, the same as m = 1."""
    mup_base_head_dim: Annotated[int, AtLeast(0, below=2**16), Needs("mup_base_width"), Resume.FUNCTION] = 0
    """head_dim of the base model: attention scores are q k sqrt(mup_base_head_dim) / head_dim. 0: the head_dim of this
    model, because wider models have more heads of the same width; scores are q k / sqrt(head_dim) as usual."""

    @property
    def width_ratio(self) -> float:
        """hidden_size / mup_base_width; 1 without mup_base_width."""
        return model_shape(self).hidden_size / self.mup_base_width if self.mup_base_width else 1.0

    @property
    def query_scale(self) -> float:
        """Factor of the queries: with q k / sqrt(E), attention scores become q k sqrt(base E) / E."""
        return math.sqrt(self.mup_base_head_dim / model_shape(self).head_dim) if self.mup_base_head_dim else 1.0

    def extend_model(self, model: Any) -> None:
        """See TrainConfig: the final norm, and with it the logits, and the queries get their factors."""
        super().extend_model(model)
        model.model.norm.factor = 1 / self.width_ratio
        for layer in model.model.layers:
            layer.self_attn.query_scale = self.query_scale

    def initial_deviation(self, name: str, sizes: tuple[float, ...], rule: Callable[..., float]) -> float:
        """See TrainConfig: that of the base model, whose widths are narrower, divided by the root of the ratio."""
        ratio, (hidden, outputs, inputs) = self.width_ratio, sizes
        is_hidden = is_hidden_matrix(name)
        base = (hidden / ratio, outputs / (ratio if is_hidden else 1), inputs / ratio)
        return super().initial_deviation(name, base, rule) * (1 / math.sqrt(ratio) if is_hidden else 1.0)

    def rate_scale(self, name: str) -> float:
        """See TrainConfig.

        Muon's update has the root mean square of AdamW's, but a spectral norm that grows with the square root of the
        width, not with the width (Yang et al. 2023, "A Spectral Condition for Feature Learning").
        """
        scale = super().rate_scale(name)
        if not is_hidden_matrix(name):
            return scale
        return scale / (math.sqrt(self.width_ratio) if self.optimizer == "muon" else self.width_ratio)

    def folded_scale(self, name: str) -> float:
        """See TrainConfig: the norms or projections before the logits and the queries take over their factors."""
        scale, queries = super().folded_scale(name), ".q_norm." if self.qk_norm else ".q_proj."
        if name.startswith(FINAL_NORM):
            return scale / self.width_ratio
        return scale * self.query_scale if queries in name else scale

    @property
    def facts(self) -> dict[str, str]:
        """See TrainConfig."""
        if not self.mup_base_width:
            return super().facts
        rate, logits = self.rate_scale("model.layers.0.mlp.up_proj.weight"), 1 / self.width_ratio
        matrices = f"matrices of the blocks x {rate:.4g} of the learning rate"
        ratio = f"{self.width_ratio:.4g} x the width of the base model"
        line = f"{ratio}: {matrices}, logits x {logits:.4g}, queries x {self.query_scale:.4g}"
        return super().facts | {"muP": line}

    @property
    def matching_settings(self) -> list[str]:
        """See TrainConfig: these settings once stood before `optimizer`, and runs keep their names."""
        names = [name for name in super().matching_settings if name not in SETTINGS]
        place = names.index("optimizer")
        return [*names[:place], *SETTINGS, *names[place:]]


def check_mup(config: MupConfig) -> Iterator[Problem]:
    """The rules of the maximal update parametrization are known for the optimizer, and everything is trained."""
    if config.mup_base_width and config.optimizer not in OPTIMIZERS:
        remedy = f"has no rule for optimizer={config.optimizer}; remove it, or use {' or '.join(OPTIMIZERS)}"
        yield problem(config, "mup_base_width", remedy)
    if config.mup_base_width and getattr(config, "lora_rank", 0):  # of an extension that need not be there
        remedy = "is for models trained from the start; export the model and train adapters on the export without it"
        yield problem(config, "mup_base_width", remedy)


CHECKS = (check_mup,)
