"""The three operations whose precision or memory is a decision: projection, attention, loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a label that is not trained on, as in torch and Hugging Face


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., I] times weight [O, I] transposed: [.., O] in x's dtype.

    Where the weight is kept wider than the activations (fp32 master, bf16 compute), its gradient is a product with
    an fp32 result: what is summed over micro-batches and devices has never been rounded to bf16.
    """
    if x.dtype == weight.dtype:
        return F.linear(x, weight)
    product: Tensor = _MixedLinear.apply(x, weight)
    return product


class _MixedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        # bf16 x bf16 products are exact in fp32; TPUs run such a product in one bf16 pass with an fp32 sum.
        grad_weight = grad.flatten(0, -2).float().t() @ x.flatten(0, -2).float()  # [O, I]
        return grad @ weight.to(grad.dtype), grad_weight.to(weight.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    """Causal softmax(q k^T / sqrt(E)) v: q [B, H, T, E], k and v [B, K, T, E] -> [B, H, T, E].

    `segments` [B, T]: a token sees only tokens of its own segment (packed documents).
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [B, H, T, E]
    if segments is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    same = segments[:, None, :, None] == segments[:, None, None, :]  # [B, 1, T, T]
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=same & causal)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over trained positions of -log p(label), fp32 scalar: logits [B, T, V], labels [B, T]."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
