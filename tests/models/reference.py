"""Attention as it is defined, with every score there at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.models.chunked import AttentionMask
from pretraining.models.dropout import keep_scale
from pretraining.noise import hash_with


def reference(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Return the weighted values of every query."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (distance < (mask.window or length))
    if mask.segments is not None:
        visible = visible & (mask.segments[:, None, :, None] == mask.segments[:, None, None, :])
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if mask.noise is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    heads = torch.arange(q.shape[1], dtype=torch.int32)[:, None, None]
    bits = hash_with(hash_with(mask.noise[:, None, :, None], heads), torch.arange(length, dtype=torch.int32))
    return (weights * keep_scale(bits, mask.dropout)) @ v
