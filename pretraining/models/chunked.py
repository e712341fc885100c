"""Causal attention in pieces of the query axis, for devices without a fused kernel of their own.

No [T, T] matrix of a head exists at any time: a piece of C queries meets only the keys up to its last one, so half of
the products are never computed, and the backward pass makes the probabilities again from one number a query
(FlashAttention-2, Dao 2023, algorithm 2, with pieces of queries only).
Shapes: B rows, K key/value heads, G query heads a key/value head, C queries of a piece, S keys that it meets, E width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretraining.models.dropout import kept
from pretraining.noise import joined

# Queries of a piece. A longer one computes more products for nothing (half a piece a query), a shorter one makes the
# compiled program larger: it holds every piece, 8 of them at 4096 tokens.
MOST, PIECES = 512, 2


class Seen(NamedTuple):
    """What a query sees of the keys up to its own."""

    segments: Tensor | None = None  # [B, T]: those of its own segment alone
    window: int | None = None  # this many, its own included
    noise: Tensor | None = None  # [B, T] int32: without those that are dropped, see models/dropout.py
    rate: float = 0.0  # how many
    rank: int = 0  # whose part of the heads these are


def chunked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Seen | None = None) -> Tensor:
    """Causal softmax(q k^T / sqrt(E)) v, softmax in fp32: q [B, H, T, E], k and v [B, K, T, E] -> [B, H, T, E]."""
    rows, heads, length, width = q.shape
    grouped = q.view(rows, k.shape[1], heads // k.shape[1], length, width)  # [B, K, G, T, E]
    y: Tensor = _Chunked.apply(grouped, k, v, *(seen or Seen()))
    return y.view(rows, heads, length, width)


def pieces(length: int) -> list[tuple[int, int]]:
    """(first, last + 1) query of each piece: at least PIECES, none above MOST."""
    size = min(MOST, max(1, -(-length // PIECES)))
    return [(first, min(first + size, length)) for first in range(0, length, size)]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Tensor | None,
        window: int | None,
        noise: Tensor | None,
        rate: float,
        rank: int,
    ) -> Tensor:
        seen = Seen(segments, window, noise, rate, rank)
        outputs, totals = [], []
        for first, last in pieces(q.shape[3]):
            low = _lowest(first, window)
            scores = _scores(q[..., first:last, :], k[:, :, low:last], seen, first, low)  # [B, K, G, C, S]
            total = scores.logsumexp(-1, keepdim=True)
            weights = _kept((scores - total).exp(), seen, first, low)
            outputs.append(_grouped(WEIGHTED, weights.to(v.dtype), v[:, :, low:last]))
            totals.append(total)
        y, total = torch.cat(outputs, 3), torch.cat(totals, 3)  # [B, K, G, T, E], [B, K, G, T, 1]
        ctx.save_for_backward(q, k, v, y, total, segments, noise)
        ctx.window, ctx.rate, ctx.rank = window, rate, rank
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, total, segments, noise = ctx.saved_tensors
        looks = Seen(segments, ctx.window, noise, ctx.rate, ctx.rank)
        scale = 1 / math.sqrt(q.shape[-1])
        shift = (grad.float() * y.float()).sum(-1, keepdim=True)  # [B, K, G, T, 1]
        grad_q, grad_k, grad_v = [], torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        for first, last in pieces(q.shape[3]):
            low = _lowest(first, ctx.window)
            here, seen, values = q[..., first:last, :], k[:, :, low:last], v[:, :, low:last]
            part = grad[..., first:last, :]
            scores = _scores(here, seen, looks, first, low)
            weights = (scores - total[..., first:last, :]).exp()  # [B, K, G, C, S]
            by_weights = _kept(_grouped(PRODUCTS, part, values).float(), looks, first, low)
            by_scores = (weights * (by_weights - shift[..., first:last, :]) * scale).to(q.dtype)
            grad_q.append(_grouped(WEIGHTED, by_scores, seen))
            unseen = (0, 0, low, k.shape[2] - last)
            weights = _kept(weights, looks, first, low)
            grad_k = grad_k + torch.nn.functional.pad(_over_queries(by_scores, here), unseen)
            grad_v = grad_v + torch.nn.functional.pad(_over_queries(weights.to(q.dtype), part), unseen)
        return torch.cat(grad_q, 3), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None, None


def _lowest(first: int, window: int | None) -> int:
    """The first key that any query from `first` on sees."""
    return 0 if window is None else max(0, first - window + 1)


def _scores(q: Tensor, k: Tensor, seen: Seen, first: int, low: int) -> Tensor:
    """Scaled products of queries from `first` on and keys from `low` on, fp32 [B, K, G, C, S], -inf where a query may
    not look."""
    count, last = q.shape[3], low + k.shape[2]
    scores = _grouped(PRODUCTS, q, k).float() / math.sqrt(q.shape[-1])
    keys = torch.arange(low, last, device=q.device)
    queries = torch.arange(first, first + count, device=q.device)[:, None]
    hidden = keys > queries  # [C, S]
    if seen.window is not None:
        hidden = hidden | (keys <= queries - seen.window)
    if seen.segments is not None:
        apart = seen.segments[:, first : first + count, None] != seen.segments[:, None, low:last]  # [B, C, S]
        hidden = hidden | apart[:, None, None]
    return scores.masked_fill(hidden, -math.inf)


def _kept(weights: Tensor, seen: Seen, first: int, low: int) -> Tensor:
    """`weights` [B, K, G, C, S] without those that dropout takes, scaled to keep their mean."""
    if seen.noise is None:
        return weights
    _, kv_heads, groups, count, keys = weights.shape
    head = seen.rank * kv_heads * groups
    heads = torch.arange(head, head + kv_heads * groups, dtype=torch.int32, device=weights.device)
    heads = heads.view(kv_heads, groups, 1, 1)
    columns = torch.arange(low, low + keys, dtype=torch.int32, device=weights.device)
    queries = seen.noise[:, None, None, first : first + count, None]  # [B, 1, 1, C, 1]
    return weights * kept(joined(joined(queries, heads), columns), seen.rate)


def _grouped(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """`equation` for x [B, K, G, C, ..] and y [B, K, S, E], whose heads the G groups share: [B, K, G, C, ..]."""
    made = contract(equation, x.flatten(2, 3), y)
    return made.view(*x.shape[:-1], made.shape[-1])


def _over_queries(x: Tensor, y: Tensor) -> Tensor:
    """x [B, K, G, C, S] and y [B, K, G, C, E] multiplied and summed over G and C: [B, K, S, E], fp32."""
    return contract(OVER_QUERIES, x.flatten(2, 3), y.flatten(2, 3)).float()


# Rows b, heads k, queries q, keys s, channels e
PRODUCTS, WEIGHTED, OVER_QUERIES = "bkqe,bkse->bkqs", "bkqs,bkse->bkqe", "bkqs,bkqe->bkse"


@torch.library.custom_op("pretraining::contract", mutates_args=())
def contract(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """torch.einsum, kept whole while a graph is traced.

    Traced through, it becomes a product of three dimensions, rows and heads in one. No device holds a run of that one
    where rows and heads are both split, so the compiler would gather all heads on every tensor rank.
    """
    return torch.einsum(equation, x, y)


@contract.register_fake
def _(equation: str, x: Tensor, y: Tensor) -> Tensor:
    inputs, output = equation.split("->")
    sizes = dict(zip(inputs.replace(",", ""), (*x.shape, *y.shape), strict=True))
    return x.new_empty([sizes[letter] for letter in output])
