"""Adapters beside frozen projections: y = W x + s B (A dropout(x)) (Hu et al. 2021). Names are PEFT's."""

from __future__ import annotations

from torch import Tensor, nn

from pretraining.config.lora import PROJECTIONS, adapted, is_trained, lora_scale
from pretraining.config.training import TrainConfig
from pretraining.models.dropout import LORA, Noise, dropped
from pretraining.models.linear import Linear


class AdaptedLinear(Linear):
    """A projection with an adapter: lora_A [r, inputs] and lora_B [outputs, r]."""

    def __init__(self, config: TrainConfig, inputs: int, outputs: int, bias: bool, site: int) -> None:
        super().__init__(inputs, outputs, bias)
        self.lora_A, self.lora_B = Linear(inputs, config.lora_rank), Linear(config.lora_rank, outputs)
        self.scale, self.dropout, self.site = lora_scale(config), config.lora_dropout, site

    def product(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        added = self.lora_B(self.lora_A(dropped(x, self.dropout, noise, self.site)))
        return super().product(x) + self.scale * added


def adapt(config: TrainConfig, model: nn.Module) -> None:
    """Give every targeted projection of `model` its adapter, and freeze what is not trained."""
    targets = adapted(config)
    for path, module in list(model.named_modules()):
        target = next((name for name in targets if path.endswith(name)), None)
        if target and isinstance(module, Linear):
            site = LORA + PROJECTIONS.index(target)
            wide = AdaptedLinear(config, module.in_features, module.out_features, module.bias is not None, site)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, wide)
    for name, weight in model.named_parameters():
        weight.requires_grad_(is_trained(config, name))
