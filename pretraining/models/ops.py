"""The operations whose precision or memory is a decision: projection, attention, and the loss in two forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.models.chunked import Seen, chunked_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FUSED = ("cuda", "cpu", "meta")  # with a flash kernel behind scaled_dot_product_attention; meta only counts
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grad @ weight.to(grad.dtype), None
        # bf16 x bf16 products are exact in fp32; TPUs run such a product in one bf16 pass with an fp32 sum.
        grad_weight = grad.flatten(0, -2).float().t() @ x.flatten(0, -2).float()  # [O, I]
        return grad @ weight.to(grad.dtype), grad_weight.to(weight.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Seen | BlockMask) -> Tensor:
    """Causal softmax(q k^T / sqrt(E)) v: q [B, H, T, E], k and v [B, K, T, E] -> [B, H, T, E].

    `seen`: which keys a query sees; as a mask of blocks, those that are empty are not computed, which pays only where
    the call is compiled. No path holds [T, T] scores of a head.
    """
    groups = q.shape[1] // k.shape[1]
    if not isinstance(seen, Seen):
        return _flex_attention(q, k, v, seen)
    if seen.window is not None and seen.window >= q.shape[2]:
        seen = seen._replace(window=None)
    plain = seen.segments is None and seen.window is None and seen.noise is None
    if q.device.type not in FUSED or not plain:
        return chunked_attention(q, k, v, seen)
    if groups > 1 and not q.is_cuda:  # CUDA's kernel reads a shared head in place
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [B, H, T, E]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    y: Any = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    return y


def document_mask(segments: Tensor, window: int | None = None) -> BlockMask:
    """`segments` [B, T] and a sliding window as blocks of 128 x 128 scores, for `attention`."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = segments.shape

    def visible(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = query - key < (window or length)
        return (query >= key) & near & (segments[row, query] == segments[row, key])

    return create_block_mask(visible, rows, None, length, length, device=str(segments.device))


def next_token_loss(logits: Tensor, labels: Tensor, vocabulary: int | None = None) -> Tensor:
    """Sum over trained positions of -log p(label), fp32 scalar: logits [.., V], labels [..].

    Columns from `vocabulary` on are padding; None: none. Elementwise but for sums over a row, so that rows, tokens and
    vocabulary may each be split over devices and nothing but those sums is communicated.
    """
    wide = without_padding(logits.float(), vocabulary)
    chosen = torch.arange(logits.shape[-1], device=logits.device) == labels[..., None]  # [.., V]
    losses = wide.logsumexp(-1) - torch.where(chosen, wide, 0).sum(-1)
    return torch.where(labels != IGNORED, losses, 0).sum()


def without_padding(logits: Tensor, vocabulary: int | None) -> Tensor:
    """`logits` [.., V] with no probability at the columns from `vocabulary` on."""
    if vocabulary is None or vocabulary >= logits.shape[-1]:
        return logits
    return logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) >= vocabulary, -torch.inf)


# Rows of logits [rows, V] that exist at a time in head_loss: 4096 of a vocabulary of 128256 are 1 GiB in bf16, and
# enough for a matrix product at full speed. Those of a batch of 32768 tokens would be 17 GB in fp32, three times over.
LOSS_ROWS = 4096

# Logits [R, V], labels [R] and how many columns are no padding -> summed loss, fp32 scalar, and its gradient by the
# logits, [R, V] in their dtype.
LossAndGradient = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def loss_and_gradient(
    logits: Tensor, labels: Tensor, vocabulary: int, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See LossAndGradient. Elementwise but for two sums per row, so that a compiler makes it one pass or two.

    The gradient is multiplied by `factor` while it is fp32.
    """
    wide = without_padding(logits.float(), vocabulary)
    trained = labels != IGNORED
    normaliser = wide.logsumexp(-1, keepdim=True)  # [R, 1]
    chosen = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]  # [R, V]
    loss = ((normaliser[:, 0] - torch.where(chosen, wide, 0).sum(-1)) * trained).sum()
    probability = (wide - normaliser).exp()
    gradient = torch.where(chosen, probability - 1, probability) * trained[:, None]
    return loss, (gradient if factor is None else gradient * factor).to(logits.dtype)


def head_loss(
    x: Tensor, weight: Tensor, labels: Tensor, vocabulary: int, inner: LossAndGradient = loss_and_gradient
) -> Tensor:
    """next_token_loss(x weight^T, labels, vocabulary) without ever holding all logits.

    x [B, T, D], weight [V, D], labels [B, T].
    The gradient is taken in the forward pass, while a piece of the logits is there, so nothing is computed twice and
    what stays for the backward pass is the gradient by x and by the weight.
    """
    rows, targets = x.flatten(0, -2), labels.flatten()
    if not torch.is_grad_enabled():
        pieces = zip(rows.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True)
        return torch.stack([inner(linear(part, weight), target, vocabulary)[0] for part, target in pieces]).sum()
    loss: Tensor = _HeadLoss.apply(rows, weight, targets, vocabulary, inner)
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, inner: LossAndGradient
    ) -> Tensor:
        narrow = weight.to(rows.dtype)
        loss = torch.zeros((), device=rows.device)
        grad_rows = torch.empty_like(rows)
        grad_weight = torch.zeros(weight.shape, device=weight.device)  # summed over pieces in fp32
        pieces = zip(rows.split(LOSS_ROWS), targets.split(LOSS_ROWS), grad_rows.split(LOSS_ROWS), strict=True)
        for part, target, grad_part in pieces:
            partial, grad = inner(part @ narrow.t(), target, vocabulary)  # [R, V]
            loss += partial
            torch.mm(grad, narrow, out=grad_part)
            grad_weight += grad.t() @ part
        ctx.save_for_backward(grad_rows, grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_rows, grad_weight = ctx.saved_tensors
        return grad_rows * grad.to(grad_rows.dtype), grad_weight * grad.to(grad_weight.dtype), None, None, None
