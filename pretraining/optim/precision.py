"""Dtypes of a run: compute, parameters, gradients and optimizer state; and stochastic rounding of fp32 to bf16.

The bits of the rounding are a hash of (seed, update, tensor, element): pretraining/noise.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pretraining.config.training import TrainConfig

FP32, BF16 = torch.float32, torch.bfloat16


class Precision(NamedTuple):
    """The dtypes of a run."""

    activations: torch.dtype = FP32  # of the residual stream
    compute: torch.dtype = FP32  # of matrix products and their inputs
    parameters: torch.dtype = FP32
    gradients: torch.dtype = FP32  # summed over micro-batches
    optimizer_state: torch.dtype = FP32
    # Of the parameters where they are bf16, otherwise of the copy that matrix products read.
    stochastic_rounding: bool = False
    # Of gradients while they are summed over devices; on the XLA engine FP32 stands for the dtype of the parameters
    gradient_reduction: torch.dtype = FP32

    @property
    def keeps_rounded_copy(self) -> bool:
        """Whether the model runs on a rounded copy of its parameters."""
        return self.stochastic_rounding and self.parameters == FP32


MODES = {
    "fp32": Precision(),
    "mixed_bf16": Precision(activations=BF16, compute=BF16),
    "mixed_bf16_sr": Precision(activations=BF16, compute=BF16, stochastic_rounding=True),
    "bf16_sr": Precision(BF16, BF16, BF16, BF16, BF16, stochastic_rounding=True),
    "autocast": Precision(compute=BF16),
}


def precision_of(config: TrainConfig) -> Precision:
    """Dtypes that `precision`, `mixed_precision` and `reduce_dtype` ask for."""
    mode = config.precision_mode
    chosen = MODES[mode] if mode in MODES else config.own_precision(mode)
    state = FP32 if config.hyperparameters.has_fp32_state else chosen.optimizer_state
    reduction = BF16 if config.reduce_dtype == "bf16" else FP32
    return chosen._replace(optimizer_state=state, gradient_reduction=reduction)


# ---- Stochastic rounding: up or down with the probability that makes the mean exact

# Moves a number of 8 significant bits by 0.6 to 1.3 times the distance to its neighbour, which is then the nearest.
NEIGHBOUR = 1.25 / 256


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 `x` to a bf16 value, returned as fp32; `bits` are 16 random bits for each element.

    Rounding to nearest loses every update below 2^-9 of a bf16 weight; rounded stochastically, the weight takes one in
    a hundred updates of 1/100 of its spacing.
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
