"""Projections of groups of rows, each by a matrix of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, autograd

from pretraining.models.chunked import contract
from pretraining.models.ops import linear


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [B, T, I] by the transpose of weight [O, I]: [B, T, O] in x's dtype. See ops.linear.

    A weight [S, O, I] has a matrix for each of S equal groups of rows.
    """
    if weight.dim() == 2:
        return linear(x, weight)
    grouped: Tensor = _GroupedLinear.apply(x, weight)
    return grouped


class _GroupedLinear(autograd.Function):
    """As the product in ops.linear. S groups, B rows of one, T tokens, I inputs, O outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        groups = x.unflatten(0, (len(weight), -1))
        return contract("sbti,soi->sbto", groups, weight.to(x.dtype)).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        groups = grad.unflatten(0, (len(weight), -1))
        grad_x = contract("sbto,soi->sbti", groups, weight.to(grad.dtype)).flatten(0, 1)
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        inputs = x.unflatten(0, (len(weight), -1))
        return grad_x, contract("sbto,sbti->soi", groups.to(weight.dtype), inputs.to(weight.dtype))
