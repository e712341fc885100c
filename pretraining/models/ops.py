"""Projection, attention and cross-entropy: the operations whose precision or memory needs a decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.models.chunked import AttentionMask, chunked_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    Mask = AttentionMask | BlockMask | tuple[BlockMask, ...]  # several: for an engine's own kernel

# An engine's own causal attention: q [B, H, T, E], k and v [B, K, T, E], mask -> [B, H, T, E]
AttentionKernel = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
# How causal attention is computed: the device's scaled_dot_product_attention has a flash kernel that reads a key/value
# head where several query heads share it ("grouped"; "contiguous": and is better given contiguous tensors) or takes a
# copy for each ("repeated"), or has none ("chunked").
Kernel = Literal["grouped", "contiguous", "repeated", "chunked"] | AttentionKernel
IGNORED = -100  # a label that is not trained on, as in torch and Hugging Face


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [.., I] by the transpose of weight [O, I]: [.., O] in x's dtype.

    Where the weight is wider than the activations (fp32 master, bf16 compute), its gradient is a product with an fp32
    result, so gradients are not rounded to bf16 before they are summed over micro-batches and devices.
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


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel: Kernel = "repeated") -> Tensor:
    """Causal softmax(q k^T / sqrt(E)) v: q [B, H, T, E], k and v [B, K, S, E] -> [B, H, T, E].

    Where S > T, the queries are those of the last T positions. Empty blocks of a BlockMask are not computed, which pays
    only where the call is compiled. No path holds the [T, S] scores of a head.
    """
    groups, is_part = q.shape[1] // k.shape[1], q.shape[2] < k.shape[2]
    if callable(kernel):
        return kernel(q, k, v, mask)
    if not isinstance(mask, AttentionMask):
        return _flex_attention(q, k, v, mask)
    if mask.window is not None and mask.window >= k.shape[2]:
        mask = mask._replace(window=None)
    is_causal_only = mask.segments is None and mask.window is None and mask.noise is None
    if kernel == "chunked" or not is_causal_only or (is_part and kernel == "repeated"):
        return chunked_attention(q, k, v, mask)
    if kernel == "contiguous":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if is_part:
        from torch.nn.attention.bias import causal_lower_right  # fused on CUDA, where a mask as a tensor is not

        lower_right: Any = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, lower_right, enable_gqa=groups > 1)
    if groups > 1 and kernel == "repeated":
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [B, H, T, E]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    y: Any = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    return y


def document_mask(segments: Tensor, window: int | None = None, queries: int | None = None) -> BlockMask:
    """Return `segments` [B, S] and a sliding window as a mask of 128 x 128 blocks, for `attention`.

    queries: how many of the last positions have a query. None: all.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = segments.shape
    queries = length if queries is None else queries
    before = length - queries

    def is_visible(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query + before
        is_near = query - key < (window or length)
        return (query >= key) & is_near & (segments[row, query] == segments[row, key])

    return create_block_mask(is_visible, rows, None, queries, length, device=str(segments.device))


# From a rank's logits [.., V] and its label logits [..], which are 0 where the label is another rank's column: the
# log-sum-exp and the label logits of all ranks, [..] each.
CombineShards = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class LossOptions(NamedTuple):
    """What the loss depends on besides the logits: settings of TrainConfig."""

    z_loss: float = 0.0
    logit_softcap: float = 0.0


PLAIN_LOSS = LossOptions()


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocabulary: int | None,
    options: LossOptions = PLAIN_LOSS,
    first: int = 0,
    combine: CombineShards | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return -log p(label) [..], plus `z_loss` times the square of the log-sum-exp, and what its gradient needs.

    That is the logits in fp32 [.., V], capped and -inf in columns of padding, whether a column is the label's [.., V],
    and the log-sum-exp [..]. Columns are `first` and following of the vocabulary; those from `vocabulary` on are
    padding (None: there is none). Elementwise but for two sums over a row, so that rows, tokens and vocabulary may each
    be sharded and only those sums are communicated: by the compiler, or by `combine`.
    """
    columns = first + torch.arange(logits.shape[-1], device=logits.device)
    logits = softcapped(logits.float(), options.logit_softcap)
    if vocabulary is not None and vocabulary < first + logits.shape[-1]:
        logits = logits.masked_fill(columns >= vocabulary, -torch.inf)
    is_label = columns == labels[..., None]
    label_logit = torch.where(is_label, logits, 0).sum(-1)
    if combine:
        log_normalizer, label_logit = combine(logits, label_logit)
    else:
        log_normalizer = logits.logsumexp(-1)
    loss = log_normalizer - label_logit
    if options.z_loss:
        loss = loss + options.z_loss * log_normalizer.square()
    return loss, logits, is_label, log_normalizer


def softcapped(logits: Tensor, cap: float) -> Tensor:
    """Return the logits, smoothly limited to less than `cap` in magnitude; 0: as they are. Gemma 2, section 2."""
    return cap * torch.tanh(logits / cap) if cap else logits


def next_token_loss(
    logits: Tensor, labels: Tensor, vocabulary: int | None = None, options: LossOptions = PLAIN_LOSS
) -> Tensor:
    """Sum of the cross-entropy over trained positions, fp32 scalar: logits [.., V], labels [..]."""
    losses, *_ = cross_entropy(logits, labels, vocabulary, options)
    return torch.where(labels != IGNORED, losses, 0).sum()


# Rows of logits [rows, V] that head_loss computes at a time: 4096 rows of a vocabulary of 128256 are 1 GiB in bf16, and
# enough for a matrix product at full speed. A batch of 32768 tokens would take 17 GB in fp32, three times over.
LOSS_ROWS = 4096

# Logits [.., V], labels [..] and the vocabulary without padding -> summed loss, fp32 scalar, and its gradient with
# respect to the logits, [.., V] in their dtype.
LossAndGradient = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def loss_and_gradient(
    logits: Tensor,
    labels: Tensor,
    vocabulary: int,
    factor: Tensor | None = None,
    options: LossOptions = PLAIN_LOSS,
    first: int = 0,
    combine: CombineShards | None = None,
) -> tuple[Tensor, Tensor]:
    """See LossAndGradient. The gradient is multiplied by `factor` (fp16's loss scale) while it is fp32."""
    if logits.is_cpu and not (combine or any(options) or torch.compiler.is_compiling() or logits.is_inference()):
        # Eagerly, each operation below reads and writes memory: torch's own kernels take 0.4 of the time.
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            used = logits if vocabulary == logits.shape[-1] else logits[..., :vocabulary]
            loss = F.cross_entropy(used.float(), labels.long(), ignore_index=IGNORED, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, logits, factor)
        return loss.detach(), gradient
    losses, capped, is_label, log_normalizer = cross_entropy(logits, labels, vocabulary, options, first, combine)
    is_trained = labels != IGNORED
    probability = (capped - log_normalizer[..., None]).exp()
    if options.z_loss:
        probability = probability * (1 + 2 * options.z_loss * log_normalizer[..., None])  # the normalizer's gradient
    gradient = torch.where(is_label, probability - 1, probability) * is_trained[..., None]
    if options.logit_softcap:
        # the slope of the cap, where columns of padding are -inf
        gradient = gradient * (1 - (capped / options.logit_softcap).square()).clamp(min=0)
    loss = torch.where(is_trained, losses, 0).sum()
    return loss, (gradient if factor is None else gradient * factor).to(logits.dtype)


def head_loss(
    x: Tensor, weight: Tensor, labels: Tensor, vocabulary: int, chunk_loss: LossAndGradient = loss_and_gradient
) -> Tensor:
    """next_token_loss(x weight^T, labels, vocabulary) without materialising all logits.

    x [B, T, D], weight [V, D], labels [B, T]. The gradient is computed in the forward pass while a chunk of the logits
    exists, so nothing is computed twice and the backward pass keeps only the gradients of x and of the weight.
    """
    rows, targets = x.flatten(0, -2), labels.flatten()
    if not torch.is_grad_enabled():
        chunks = zip(rows.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True)
        return torch.stack([chunk_loss(linear(x, weight), label, vocabulary)[0] for x, label in chunks]).sum()
    loss, grad_rows, grad_weight = _loss_and_gradients(rows, weight, targets, vocabulary, chunk_loss)
    given: Tensor = _WithGradients.apply(rows, weight, loss, grad_rows, grad_weight)
    return given


@torch.no_grad()
def _loss_and_gradients(
    rows: Tensor, weight: Tensor, targets: Tensor, vocabulary: int, chunk_loss: LossAndGradient
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss and its gradients with respect to the rows and the weight."""
    compute_weight = weight.to(rows.dtype)
    loss = torch.zeros((), device=rows.device)
    grad_rows = torch.empty_like(rows)
    grad_weight = torch.zeros(weight.shape, device=weight.device)  # summed over chunks in fp32
    chunks = zip(rows.split(LOSS_ROWS), targets.split(LOSS_ROWS), grad_rows.split(LOSS_ROWS), strict=True)
    for x, labels, grad_x in chunks:
        partial_loss, grad_logits = chunk_loss(x @ compute_weight.t(), labels, vocabulary)  # [R, V]
        loss += partial_loss
        torch.mm(grad_logits, compute_weight, out=grad_x)
        grad_weight += grad_logits.t() @ x
    return loss, grad_rows, grad_weight.to(weight.dtype)


class _WithGradients(torch.autograd.Function):
    """A scalar whose gradients with respect to two tensors are given."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, __: Tensor, value: Tensor, *gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        of_rows, of_weight = (gradient * grad.to(gradient.dtype) if needed else None for gradient, needed in given)
        return of_rows, of_weight, None, None, None
