"""Low-rank adapters of projections, and their initial values.

An adapted projection is y = W x + s B (A dropout(x)) with a frozen W (Hu et al. 2021). Names are PEFT's.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn

from pretraining.extensions.lora.settings import LoraConfig
from pretraining.extensions.lora.targets import adapted, is_trained, lora_scale
from pretraining.extensions.projections import PROJECTIONS
from pretraining.models.dropout import EXTENSIONS, DropoutNoise, dropout
from pretraining.models.init import draw, on_meta
from pretraining.models.llama import Linear


class AdaptedLinear(Linear):
    """A projection with an adapter: lora_A [r, inputs] and lora_B [outputs, r]."""

    def __init__(self, config: LoraConfig, base: Linear, site: int, is_row_parallel: bool) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None)
        self.lora_A = Linear(base.in_features, config.lora_rank)
        self.lora_B = Linear(config.lora_rank, base.out_features)
        self.scale, self.dropout, self.site = lora_scale(config), config.lora_dropout, site
        self.is_row_parallel = is_row_parallel

    def added(self, x: Tensor, noise: DropoutNoise | None = None) -> Tensor:
        """Return what the adapter adds to the product."""
        dropped = dropout(x, self.dropout, noise, self.site, is_sharded=self.is_row_parallel)
        return self.scale * self.lora_B(self.lora_A(dropped))


def adapt(config: LoraConfig, model: nn.Module) -> None:
    """Replace every targeted projection of `model` by an adapted one, and freeze what is not trained."""
    targets = adapted(config)
    for path, module in list(model.named_modules()):
        target = next((name for name in targets if path.endswith(name)), None)
        if target and isinstance(module, Linear):
            parent, _, name = path.rpartition(".")
            is_row_parallel = target.endswith(("o_proj", "down_proj"))
            site = EXTENSIONS + PROJECTIONS.index(target)
            adapted_module = AdaptedLinear(config, module, site, is_row_parallel)
            setattr(model.get_submodule(parent), name, adapted_module)
    for name, weight in model.named_parameters():
        weight.requires_grad_(is_trained(config, name))


def describe_trained(config: LoraConfig) -> str:
    """Return how many parameters are trained, and which."""
    sizes = {name: weight.numel() for name, weight in on_meta(config).named_parameters()}
    trained = [name for name in sizes if config.is_trained(name)]
    short = (re.sub(r"^model\.(layers\.\d+\.)?((self_attn|mlp)\.)?|\.weight$", "", name) for name in trained)
    kinds = dict.fromkeys(re.sub(r"\.lora_[AB]$", f" (rank {config.lora_rank})", name) for name in short)
    count, total = sum(sizes[name] for name in trained), sum(sizes.values())
    is_idle = config.lora_bias != "none" and not any(name.endswith(".bias") for name in trained)
    note = f"; lora_bias={config.lora_bias}: no effect on a model without such biases" if is_idle else ""
    return f"{count:,} of {total:,} parameters ({count / total:.2%}): {', '.join(kinds)}{note}"


def initial_value(config: LoraConfig, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return the initial value of a matrix of an adapter."""
    if ".lora_B." in name:  # the adapted model starts as the frozen one
        return torch.zeros(shape)
    if config.lora_init == "default":  # PEFT's: uniform within 1 / sqrt(inputs)
        return torch.rand(shape, generator=generator).mul_(2).sub_(1).div_(math.sqrt(shape[1]))
    return draw(config.init_method, shape, 1 / config.lora_rank, generator)
