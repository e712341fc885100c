"""Causal attention in pieces of the query axis, for devices without a fused kernel of their own.

No [T, T] matrix of a head exists at any time: a piece of C queries meets only the keys up to its last one, so half of
the products are never computed, and the backward pass makes the probabilities again from one number a query
(FlashAttention-2, Dao 2023, algorithm 2, with pieces of queries only).
Shapes: B rows, K key/value heads, G query heads a key/value head, C queries of a piece, S keys that it meets, E width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# Queries of a piece. A longer one computes more products for nothing (half a piece a query), a shorter one makes the
# compiled program larger: it holds every piece, 8 of them at 4096 tokens.
MOST, PIECES = 512, 2


def chunked_attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
    """Causal softmax(q k^T / sqrt(E)) v, softmax in fp32: q [B, H, T, E], k and v [B, K, T, E] -> [B, H, T, E].

    `segments` [B, T]: a token sees only tokens of its own segment.
    """
    rows, heads, length, width = q.shape
    grouped = q.view(rows, k.shape[1], heads // k.shape[1], length, width)  # [B, K, G, T, E]
    y: Tensor = _Chunked.apply(grouped, k, v, segments)
    return y.view(rows, heads, length, width)


def pieces(length: int) -> list[tuple[int, int]]:
    """(first, last + 1) query of each piece: at least PIECES, none above MOST."""
    size = min(MOST, max(1, -(-length // PIECES)))
    return [(first, min(first + size, length)) for first in range(0, length, size)]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
        outputs, totals = [], []
        for first, last in pieces(q.shape[3]):
            scores = _scores(q[..., first:last, :], k[:, :, :last], segments, first)  # [B, K, G, C, S]
            total = scores.logsumexp(-1, keepdim=True)
            outputs.append(_grouped(WEIGHTED, (scores - total).exp().to(v.dtype), v[:, :, :last]))
            totals.append(total)
        y, total = torch.cat(outputs, 3), torch.cat(totals, 3)  # [B, K, G, T, E], [B, K, G, T, 1]
        ctx.save_for_backward(q, k, v, y, total, segments)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, total, segments = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[-1])
        shift = (grad.float() * y.float()).sum(-1, keepdim=True)  # [B, K, G, T, 1]
        grad_q, grad_k, grad_v = [], torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        for first, last in pieces(q.shape[3]):
            here, seen, values = q[..., first:last, :], k[:, :, :last], v[:, :, :last]
            part = grad[..., first:last, :]
            scores = _scores(here, seen, segments, first)
            weights = (scores - total[..., first:last, :]).exp()  # [B, K, G, C, S]
            by_weights = _grouped(PRODUCTS, part, values).float()
            by_scores = (weights * (by_weights - shift[..., first:last, :]) * scale).to(q.dtype)
            grad_q.append(_grouped(WEIGHTED, by_scores, seen))
            unseen = (0, 0, 0, k.shape[2] - last)
            grad_k = grad_k + torch.nn.functional.pad(_over_queries(by_scores, here), unseen)
            grad_v = grad_v + torch.nn.functional.pad(_over_queries(weights.to(q.dtype), part), unseen)
        return torch.cat(grad_q, 3), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _scores(q: Tensor, k: Tensor, segments: Tensor | None, first: int) -> Tensor:
    """Scaled products of a piece, fp32 [B, K, G, C, S], -inf where a query may not look."""
    count, seen = q.shape[3], k.shape[2]
    scores = _grouped(PRODUCTS, q, k).float() / math.sqrt(q.shape[-1])
    keys = torch.arange(seen, device=q.device)
    hidden = keys > torch.arange(first, first + count, device=q.device)[:, None]  # [C, S]
    if segments is not None:
        apart = segments[:, first : first + count, None] != segments[:, None, :seen]  # [B, C, S]
        hidden = hidden | apart[:, None, None]
    return scores.masked_fill(hidden, -math.inf)


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
