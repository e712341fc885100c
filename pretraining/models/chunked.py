"""Attention in chunks of the query axis, for devices without a fused attention kernel.

No [T, T] matrix of a head ever exists: a chunk of C queries reads only the keys up to its last query, so half of the
products are never computed, and the backward pass recomputes the probabilities from one number per query
(FlashAttention-2, Dao 2023, algorithm 2, chunked over queries only).
Shapes: B rows, K key/value heads, G query heads per key/value head, C queries of a chunk, S keys that it reads, E head
width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretraining.models.dropout import keep_scale
from pretraining.noise import hash_with

# Queries of a chunk. A longer chunk computes more masked products (half a chunk per query); a shorter one makes the
# compiled program larger, because it contains every chunk: 8 of them at 4096 tokens.
MAX_CHUNK, MIN_CHUNKS = 512, 2


class AttentionMask(NamedTuple):
    """Which keys, of those up to its own position, a query attends to. Queries are the last T of S positions."""

    segments: Tensor | None = None  # [B, S]: keys of the query's own segment only
    window: int | None = None  # this many keys, its own included
    noise: Tensor | None = None  # [B, S] int32: hashes that decide which keys are dropped, see models/dropout.py
    dropout: float = 0.0  # probability that a key is dropped
    tensor_rank: int = 0  # whose shard of the heads these are


def chunked_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Causal softmax(q k^T / sqrt(E)) v, softmax in fp32: q [B, H, T, E], k and v [B, K, S, E] -> [B, H, T, E].

    Where S > T, the queries are those of the last T positions.
    """
    rows, heads, length, width = q.shape
    grouped = q.view(rows, k.shape[1], heads // k.shape[1], length, width)  # [B, K, G, T, E]
    y: Tensor = _Chunked.apply(grouped, k, v, *mask)
    return y.view(rows, heads, length, width)


def chunk_bounds(length: int) -> list[tuple[int, int]]:
    """Return (first, last + 1) query of each chunk: at least MIN_CHUNKS chunks, none above MAX_CHUNK."""
    size = min(MAX_CHUNK, max(1, -(-length // MIN_CHUNKS)))
    return [(first, min(first + size, length)) for first in range(0, length, size)]


def _chunks(q: Tensor, k: Tensor) -> list[tuple[slice, int, int]]:
    """Return of each chunk its queries in `q`, the position of the first one, and the end of their keys."""
    before = k.shape[2] - q.shape[3]
    return [(slice(first, last), before + first, before + last) for first, last in chunk_bounds(q.shape[3])]


class _Chunked(torch.autograd.Function):
    """Takes the fields of the mask one by one, because autograd finds tensors among the arguments only."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *fields: Any) -> Tensor:
        mask = AttentionMask(*fields)
        outputs, normalizers = [], []
        for queries, first, last in _chunks(q, k):
            low = _lowest_key(first, mask.window)
            scores = _scores(q[..., queries, :], k[:, :, low:last], mask, first, low)  # [B, K, G, C, S]
            normalizer = scores.logsumexp(-1, keepdim=True)
            weights = _dropped((scores - normalizer).exp(), mask, first, low)
            outputs.append(_per_group(WEIGHTED_SUM, weights.to(v.dtype), v[:, :, low:last]))
            normalizers.append(normalizer)
        y, normalizer = torch.cat(outputs, 3), torch.cat(normalizers, 3)  # [B, K, G, T, E], [B, K, G, T, 1]
        ctx.save_for_backward(q, k, v, y, normalizer, mask.segments, mask.noise)
        ctx.window, ctx.dropout, ctx.tensor_rank = mask.window, mask.dropout, mask.tensor_rank
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, normalizer, segments, noise = ctx.saved_tensors
        mask = AttentionMask(segments, ctx.window, noise, ctx.dropout, ctx.tensor_rank)
        scale = 1 / math.sqrt(q.shape[-1])
        shift = (grad.float() * y.float()).sum(-1, keepdim=True)  # [B, K, G, T, 1]
        grad_q, grad_k, grad_v = [], torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        for chunk, first, last in _chunks(q, k):
            low = _lowest_key(first, ctx.window)
            queries, keys, values = q[..., chunk, :], k[:, :, low:last], v[:, :, low:last]
            grad_chunk = grad[..., chunk, :]
            scores = _scores(queries, keys, mask, first, low)
            weights = (scores - normalizer[..., chunk, :]).exp()  # [B, K, G, C, S]
            grad_weights = _dropped(_per_group(PRODUCTS, grad_chunk, values).float(), mask, first, low)
            grad_scores = (weights * (grad_weights - shift[..., chunk, :]) * scale).to(q.dtype)
            grad_q.append(_per_group(WEIGHTED_SUM, grad_scores, keys))
            padding = (0, 0, low, k.shape[2] - last)
            weights = _dropped(weights, mask, first, low)
            grad_k = grad_k + torch.nn.functional.pad(_sum_over_queries(grad_scores, queries), padding)
            grad_v = grad_v + torch.nn.functional.pad(_sum_over_queries(weights.to(q.dtype), grad_chunk), padding)
        return torch.cat(grad_q, 3), grad_k.to(k.dtype), grad_v.to(v.dtype), *(None,) * len(mask)


def _lowest_key(first: int, window: int | None) -> int:
    """First key that any query from `first` on attends to."""
    return 0 if window is None else max(0, first - window + 1)


def _scores(q: Tensor, k: Tensor, mask: AttentionMask, first: int, low: int) -> Tensor:
    """Scaled products of queries from position `first` on and keys from `low` on, fp32; -inf where masked."""
    count, last = q.shape[3], low + k.shape[2]
    scores = _per_group(PRODUCTS, q, k).float() / math.sqrt(q.shape[-1])
    keys = torch.arange(low, last, device=q.device)
    queries = torch.arange(first, first + count, device=q.device)[:, None]
    masked = keys > queries  # [C, S]
    if mask.window is not None:
        masked = masked | (keys <= queries - mask.window)
    if mask.segments is not None:
        differs = mask.segments[:, first : first + count, None] != mask.segments[:, None, low:last]  # [B, C, S]
        masked = masked | differs[:, None, None]
    return scores.masked_fill(masked, -math.inf)


def _dropped(weights: Tensor, mask: AttentionMask, first: int, low: int) -> Tensor:
    """Apply attention dropout to `weights` [B, K, G, C, S]."""
    if mask.noise is None:
        return weights
    _, kv_heads, groups, count, keys = weights.shape
    head = mask.tensor_rank * kv_heads * groups
    heads = torch.arange(head, head + kv_heads * groups, dtype=torch.int32, device=weights.device)
    heads = heads.view(kv_heads, groups, 1, 1)
    columns = torch.arange(low, low + keys, dtype=torch.int32, device=weights.device)
    queries = mask.noise[:, None, None, first : first + count, None]  # [B, 1, 1, C, 1]
    return weights * keep_scale(hash_with(hash_with(queries, heads), columns), mask.dropout)


def _per_group(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """`equation` for x [B, K, G, C, ..] and y [B, K, S, E], whose heads the G groups share: [B, K, G, C, ..]."""
    product = contract(equation, x.flatten(2, 3), y)
    return product.view(*x.shape[:-1], product.shape[-1])


def _sum_over_queries(x: Tensor, y: Tensor) -> Tensor:
    """x [B, K, G, C, S] and y [B, K, G, C, E] multiplied and summed over G and C: [B, K, S, E], fp32."""
    return contract(OVER_QUERIES, x.flatten(2, 3), y.flatten(2, 3)).float()


# Rows b, heads k, queries q, keys s, channels e
PRODUCTS, WEIGHTED_SUM, OVER_QUERIES = "bkqe,bkse->bkqs", "bkqs,bkse->bkqe", "bkqs,bkqe->bkse"


@torch.library.custom_op("pretraining::contract", mutates_args=())
def contract(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """torch.einsum as one node of a traced graph.

    Traced through, it becomes a batched product whose batch dimension merges rows and heads. Where both are sharded, no
    device holds a contiguous range of the merged dimension, so the compiler would gather all heads on every rank.
    """
    return torch.einsum(equation, x, y)


@contract.register_fake
def _(equation: str, x: Tensor, y: Tensor) -> Tensor:
    inputs, output = equation.split("->")
    sizes = dict(zip(inputs.replace(",", ""), (*x.shape, *y.shape), strict=True))
    return x.new_empty([sizes[letter] for letter in output])
