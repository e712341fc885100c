"""Stochastic rounding of fp32 to bf16: up or down with the probability that makes the mean exact.

Round to nearest loses every update below 2^-9 of a bf16 weight; rounded at random, a weight takes the hundredth of
them that it should. The noise is a hash of (seed, update, tensor, element), not a generator's state: the same on every
mesh and engine, and after a resume.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor


def keys(seed: int, names: Sequence[str]) -> Tensor:
    """A number for each tensor of these names, int32 [names]."""
    numbers = [zlib.crc32(f"{seed} {name}".encode()) for name in names]
    return torch.tensor(numbers, dtype=torch.int64).sub(2**31).to(torch.int32)


def noise(key: Tensor, update: Tensor, shape: torch.Size, starts: Sequence[int] | None = None) -> Tensor:
    """16 bits for each element of a tensor of this shape, int32; key and update broadcast with it.

    starts: where the tensor begins in a larger one, by dimension. Each dimension's index is hashed in turn, for the
    elements of a large stack do not fit 32 bits.
    """
    state = _mixed(key ^ _mixed(update.int()))
    for dim, extent in enumerate(shape):
        index = torch.arange(extent, dtype=torch.int32, device=update.device) + (starts[dim] if starts else 0)
        state = _mixed(state + (index + 1).view(-1, *(1,) * (len(shape) - 1 - dim)) * -1640531535)
    return state & 0xFFFF


def _mixed(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser on int32 (Appleby 2011): every bit of the result depends on every bit of `x`."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 `x` on the grid of bf16, still fp32: the neighbour away from zero with the probability of x's place between
    the two, which 16 random bits decide exactly.

    By arithmetic alone: torch-xla takes a view as integers to the host and back, and XLA may drop a cast to bf16 that
    is followed by one to fp32.
    """
    nearest = _eight_bits(x)
    below = torch.where(nearest.abs() > x.abs(), _eight_bits(nearest * (1 - NEIGHBOUR)), nearest)
    above = _eight_bits(below * (1 + NEIGHBOUR))
    return torch.where(bits < (x - below) / (above - below) * 65536, above, below)


# Moves a number of 8 significant bits by 0.6 to 1.3 of the distance to its neighbour, which is then the nearest.
NEIGHBOUR = 1.25 / 256


def _eight_bits(x: Tensor) -> Tensor:
    """`x` to the nearest number of 8 significant bits, as bf16 has (Dekker 1971, splitting by 2^16 + 1)."""
    scaled = x * 65537
    return scaled - (scaled - x)
