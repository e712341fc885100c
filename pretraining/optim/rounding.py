"""Stochastic rounding of fp32 to bf16: up or down with the probability that makes the mean exact.

Rounding to nearest loses every update below 2^-9 of a bf16 weight; rounded stochastically, the weight takes one in a
hundred updates of 1/100 of its spacing. The bits are a hash of (seed, update, tensor, element): pretraining/noise.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Moves a number of 8 significant bits by 0.6 to 1.3 times the distance to its neighbour, which is then the nearest.
NEIGHBOUR = 1.25 / 256


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 `x` to a bf16 value, returned as fp32; `bits` are 16 random bits for each element.

    The result is the neighbour away from zero with the probability of x's position between its two neighbours. Uses
    arithmetic only: torch-xla copies a view as integers to the host and back, and XLA may drop a cast to bf16 that is
    followed by one to fp32.
    """
    nearest = _eight_bits(x)
    below = torch.where(nearest.abs() > x.abs(), _eight_bits(nearest * (1 - NEIGHBOUR)), nearest)
    above = _eight_bits(below * (1 + NEIGHBOUR))
    return torch.where(bits < (x - below) / (above - below) * 65536, above, below)


def _eight_bits(x: Tensor) -> Tensor:
    """Round `x` to nearest in 8 significant bits, as many as bf16 has (Dekker 1971, splitting by 2^16 + 1)."""
    scaled = x * 65537
    return scaled - (scaled - x)
