"""Which dtype the matrix products run in. Parameters, gradients and optimizer state are fp32 in every mode."""

from __future__ import annotations

import torch

from pretraining.config.training import TrainConfig


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of activations and matrix products that `mixed_precision` and `precision` ask for."""
    mode = config.precision
    if mode == "auto":
        mode = "mixed_bf16" if config.mixed_precision else "fp32"
    return {"fp32": torch.float32, "mixed_bf16": torch.bfloat16}[mode]
