"""Projections whose weight may have a wider dtype than their input, and their low-rank adapters.

An adapted projection is y = W x + s B (A dropout(x)) with a frozen W (Hu et al. 2021). Names are PEFT's.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pretraining.config.lora import PROJECTIONS, adapted, is_trained, lora_scale
from pretraining.config.training import TrainConfig
from pretraining.models.dropout import LORA, DropoutNoise, dropout
from pretraining.models.ops import linear, per_row


class Module(nn.Module):
    """nn.Module whose call is typed to return a tensor."""

    __call__: Callable[..., Tensor]


class Linear(nn.Linear, Module):
    """A projection whose weight may stay fp32 while its input is bf16 (see ops.linear)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.multiply = linear  # of x and the weight

    def forward(self, x: Tensor, noise: DropoutNoise | None = None) -> Tensor:
        """Project x; `noise` decides what an adapter drops."""
        return self.add_bias(self.product(x, noise))

    def product(self, x: Tensor, noise: DropoutNoise | None = None) -> Tensor:
        """Project x without adding the bias: the products of shards of x sum up to the product of x."""
        return self.multiply(x, self.weight)

    def add_bias(self, y: Tensor) -> Tensor:
        """Add the bias to a product, if there is one."""
        return y if self.bias is None else y + per_row(self.bias.to(y.dtype), y)


class AdaptedLinear(Linear):
    """A projection with an adapter: lora_A [r, inputs] and lora_B [outputs, r]."""

    def __init__(self, config: TrainConfig, base: Linear, site: int) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None)
        self.lora_A = Linear(base.in_features, config.lora_rank)
        self.lora_B = Linear(config.lora_rank, base.out_features)
        self.scale, self.dropout, self.site = lora_scale(config), config.lora_dropout, site

    def product(self, x: Tensor, noise: DropoutNoise | None = None) -> Tensor:
        return super().product(x) + self.added(x, noise)

    def added(self, x: Tensor, noise: DropoutNoise | None = None) -> Tensor:
        """Return what the adapter adds to the product."""
        return self.scale * self.lora_B(self.lora_A(dropout(x, self.dropout, noise, self.site)))


def adapt(config: TrainConfig, model: nn.Module) -> None:
    """Replace every targeted projection of `model` by an adapted one, and freeze what is not trained."""
    targets = adapted(config)
    for path, module in list(model.named_modules()):
        target = next((name for name in targets if path.endswith(name)), None)
        if target and isinstance(module, Linear):
            parent, _, name = path.rpartition(".")
            adapted_module = AdaptedLinear(config, module, LORA + PROJECTIONS.index(target))
            setattr(model.get_submodule(parent), name, adapted_module)
    for name, weight in model.named_parameters():
        weight.requires_grad_(is_trained(config, name))
