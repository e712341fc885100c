"""Stochastic rounding of fp32 to bf16: up or down with the probability that makes the mean exact.

Round to nearest loses every update below 2^-9 of a bf16 weight; rounded at random, a weight takes the hundredth of
them that it should. The bits are a hash of (seed, update, tensor, element): see pretraining/noise.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
