"""Dropout whose choice is a function of place and time: of (seed, update, row of the global batch, token, channel).

So every mesh and engine drops the same values, a block that is recomputed drops them again, and a run that was stopped
goes on as if it had not been. Source: Srivastava et al. 2014; the bits are pretraining/noise.py's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pretraining.config.lora import PROJECTIONS
from pretraining.noise import high, joined, keys, mixed

EMBEDDING, ATTENDED, FED, ACTIVATION, WEIGHTS, LORA = range(6)  # where values are dropped; from LORA on, adapters
# Where a tensor rank may see a part of the channels: what goes into down_proj and o_proj
IN_PARTS = (ACTIVATION, *(LORA + i for i, name in enumerate(PROJECTIONS) if name.endswith(("o_proj", "down_proj"))))


class Noise(NamedTuple):
    """What the choice is made from in one block."""

    cells: Tensor  # [B, T] int32: a hash for each token of the global batch
    layer: Tensor  # int32 scalar
    rank: int = 0  # whose part of heads and feed-forward channels is seen here

    def at(self, site: int) -> Tensor:
        """[B, T] int32, of this block and this site."""
        return joined(joined(self.cells, self.layer), torch.full_like(self.layer, site))


def noise_of(seed: int, update: Tensor, cells: Tensor) -> Noise:
    """For the first block: `cells` [B, T] int32 numbers the tokens of the global batch, `update` those before it."""
    state = mixed(keys(seed, ["dropout"])[0].to(cells.device) ^ mixed(update.int()))
    return Noise(joined(state, cells), torch.zeros((), dtype=torch.int32, device=cells.device))


def following(noise: Noise | None) -> Noise | None:
    """For the next block."""
    return None if noise is None else noise._replace(layer=noise.layer + 1)


def dropped(x: Tensor, rate: float, noise: Noise | None, site: int) -> Tensor:
    """`x` [B, T, C] with the share `rate` of its values at 0, and the others scaled to keep the mean."""
    if noise is None or not rate:
        return x
    first = noise.rank * x.shape[-1] if site in IN_PARTS else 0
    channels = torch.arange(first, first + x.shape[-1], dtype=torch.int32, device=x.device)
    return x * kept(joined(noise.at(site)[..., None], channels), rate).to(x.dtype)


def kept(bits: Tensor, rate: float) -> Tensor:
    """fp32: 0 where a hash says so, otherwise 1 / (1 - rate)."""
    return (high(bits, 24) >= int(rate * 2**24)).float() / (1 - rate)
