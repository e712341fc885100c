"""Dropout as a pure function of (seed, update, token of the global batch, block, site, channel).

Every mesh and engine therefore drops the same values, a recomputed block drops them again, and a resumed run continues
bitwise identically. Source: Srivastava et al. 2014; random bits: pretraining/noise.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pretraining.noise import hash_with, murmur_finalizer, name_hashes, upper_bits

# Sites of a block at which values are dropped; those of an extension are EXTENSIONS + i.
EMBEDDING, ATTENTION_OUTPUT, MLP_OUTPUT, MLP_ACTIVATION, ATTENTION_WEIGHTS, EXTENSIONS = range(6)


class DropoutNoise(NamedTuple):
    """Hashes that decide what one block drops."""

    token_hashes: Tensor  # [B, T] int32, of each token's index in the global batch
    layer: Tensor  # int32 scalar, or [B, 1] where rows are in different blocks
    tensor_rank: int = 0  # whose shard of heads, feed-forward channels and tokens the block computes

    def site_hash(self, site: int) -> Tensor:
        """Hashes of this block's tokens at `site`, [B, T] int32."""
        return hash_with(hash_with(self.token_hashes, self.layer), torch.full_like(self.layer, site))

    def next_block(self, count: int = 1) -> DropoutNoise:
        """Return the hashes of the block `count` blocks further."""
        return self._replace(layer=self.layer + count)


def dropout_noise(seed: int, update: Tensor, token_index: Tensor) -> DropoutNoise:
    """Return the hashes of the first block; `token_index` [B, T] int32 is the index in the global batch."""
    seed_hash = name_hashes(seed, ["dropout"])[0].to(token_index.device, non_blocking=True)
    state = murmur_finalizer(seed_hash ^ murmur_finalizer(update.int()))
    layer = torch.zeros((), dtype=torch.int32, device=token_index.device)
    return DropoutNoise(hash_with(state, token_index), layer)


def dropout(x: Tensor, rate: float, noise: DropoutNoise | None, site: int, *, is_sharded: bool = False) -> Tensor:
    """Set the share `rate` of x [B, T, C] to 0 and scale the other values to keep the mean.

    is_sharded: tensor ranks shard the channels, as those of the inputs of o_proj and down_proj.
    """
    if noise is None or not rate:
        return x
    first = noise.tensor_rank * x.shape[-1] if is_sharded else 0
    channels = torch.arange(first, first + x.shape[-1], dtype=torch.int32, device=x.device)
    hashes, length = noise.site_hash(site), x.shape[1]
    if length < hashes.shape[1]:  # sequence_parallel: this tensor rank's tokens of the residual stream
        hashes = hashes.narrow(1, noise.tensor_rank * length, length)
    return (x * keep_scale(hash_with(hashes[..., None], channels), rate)).to(x.dtype)  # 1 / 0.9 in bf16 is 0.16 % less


def keep_scale(bits: Tensor, rate: float) -> Tensor:
    """Return 0 where the hash drops a value and 1 / (1 - rate) elsewhere, fp32."""
    return (upper_bits(bits, 24) >= int(rate * 2**24)).float() / (1 - rate)
