"""Projections whose weight may have a wider dtype than their input."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pretraining.models.dropout import DropoutNoise
from pretraining.models.ops import linear


class Module(nn.Module):
    """nn.Module whose call is typed to return a tensor."""

    __call__: Callable[..., Tensor]


class Linear(nn.Linear, Module):
    """A projection whose weight may stay fp32 while its input is bf16 (see ops.linear)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.multiply = linear  # of x and the weight

    def reset_parameters(self) -> None:
        """Leave the weight as it is: models/init.py sets it, and on meta nn.Linear's own imports sympy (0.6 CPU s)."""

    def forward(self, x: Tensor, noise: DropoutNoise | None = None) -> Tensor:
        """Project x; `noise` decides what `added` drops."""
        return self.add_bias(self.product(x, noise))

    def product(self, x: Tensor, noise: DropoutNoise | None = None) -> Tensor:
        """Project x without adding the bias: the products of shards of x sum up to the product of x."""
        product, added = self.multiply(x, self.weight), self.added(x, noise)
        return product if added is None else product + added

    def added(self, x: Tensor, noise: DropoutNoise | None = None) -> Tensor | None:
        """Return what a subclass adds to the product of the weight; None: nothing."""
        return None

    def add_bias(self, y: Tensor) -> Tensor:
        """Add the bias to a product, if there is one."""
        return y if self.bias is None else y + self.bias.to(y.dtype)
