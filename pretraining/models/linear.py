"""A projection whose weight may be kept wider than its input."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pretraining.models.dropout import Noise
from pretraining.models.ops import linear


class Module(nn.Module):
    """nn.Module whose call is known to give a tensor."""

    __call__: Callable[..., Tensor]


class Linear(nn.Linear, Module):
    """A projection whose weight may stay fp32 while its input is bf16 (see ops.linear)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        """`noise` is for those that drop some of their input (models/lora.py)."""
        return self.biased(self.product(x, noise))

    def product(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        """Without the bias: what parts of the input give adds up to what all of it gives."""
        return linear(x, self.weight)

    def biased(self, y: Tensor) -> Tensor:
        """A product with the bias, where there is one."""
        return y if self.bias is None else y + self.bias.to(y.dtype)
