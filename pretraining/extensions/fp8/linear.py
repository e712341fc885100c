"""The linear layers of the blocks as products of float8 matrices, each scaled by a factor of its own.

Inputs and weights are rounded to e4m3 and gradients to e5m2 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning",
arXiv:2209.05433), each times the largest power of two with which its largest element does not overflow. Powers of two
keep the relative error of every element the same, so that the loss hardly depends on how a batch is divided over
micro-batches and ranks, each of which has a factor of its own. Sums are fp32, inside torch._scaled_mm (torch 2.9).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pretraining.config.errors import UserError
from pretraining.extensions.projections import PROJECTIONS
from pretraining.models.llama import Linear
from pretraining.parallel.accelerator import HOST, device_name

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CAPABILITY = (8, 9)  # CUDA's compute capability of the first GPUs that multiply float8 matrices (L40, H100)
SMALLEST = 2.0**-100  # of a largest element, so that neither the factor nor its inverse leaves the range of fp32


class Float8(NamedTuple):
    """A matrix x as `values` * `inverse`."""

    values: Tensor  # float8, [M, N]
    inverse: Tensor  # of the factor, fp32 scalar

    def transposed(self) -> Float8:
        """Return the transpose, row-major."""
        return Float8(self.values.t().contiguous(), self.inverse)


def quantize(x: Tensor, dtype: torch.dtype) -> Float8:
    """Round `x` to a float8 `dtype`. Infinities and NaN make the result not finite."""
    largest = torch.finfo(dtype).max
    factor = torch.exp2(torch.floor(torch.log2(largest / x.abs().amax().float().clamp(min=SMALLEST))))
    scaled = (x.float() * factor).clamp(-largest, largest)  # log2 may be rounded up
    return Float8(scaled.to(dtype), 1 / factor)


def fp8_matmul(a: Float8, b: Float8, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Multiply a [M, K] by the transpose of b [N, K]: [M, N] in `dtype`. All sizes are multiples of 16.

    `fast`: tensor cores may sum with fewer bits, as torchao does in forward passes.
    """
    product: Tensor = torch._scaled_mm(
        a.values, b.values.t(), a.inverse, b.inverse, out_dtype=dtype, use_fast_accum=fast
    )
    return product


def float8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [.., I] by the transpose of weight [O, I]: [.., O] in x's dtype. See ops.linear."""
    product: Tensor = _Float8Linear.apply(x.flatten(0, -2), weight)
    return product.view(*x.shape[:-1], -1)


class _Float8Linear(torch.autograd.Function):
    """Keeps its inputs for the backward pass in their own dtype: they are not copied, and FSDP frees the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return fp8_matmul(quantize(x, E4M3), quantize(weight.to(x.dtype), E4M3), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        rounded = quantize(grad, E5M2)  # [T, O]
        if ctx.needs_input_grad[0]:
            grad_x = fp8_matmul(rounded, quantize(weight.to(x.dtype), E4M3).transposed(), x.dtype)  # [T, I]
        if ctx.needs_input_grad[1]:
            grad_weight = fp8_matmul(rounded.transposed(), quantize(x, E4M3).transposed(), weight.dtype)  # [O, I]
        return grad_x, grad_weight


def use_float8(model: nn.Module) -> None:
    """Let the projections of the blocks multiply in float8; norms, adapters, embedding and output head do not."""
    for path, module in model.named_modules():
        if isinstance(module, Linear) and path.endswith(PROJECTIONS):
            module.multiply = float8_linear


def require_float8(device: torch.device) -> None:
    """Raise UserError if `device`, a GPU or the CPU, cannot multiply float8 matrices."""
    if device != HOST and torch.cuda.get_device_capability(device) < CAPABILITY:
        needed = ".".join(map(str, CAPABILITY))
        remedy = f"needs a GPU of compute capability {needed}, such as L40 or H100, and this is {device_name(device)}"
        raise UserError(f"--precision=fp8 {remedy}; use mixed_bf16")
