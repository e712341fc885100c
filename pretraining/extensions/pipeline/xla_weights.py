"""Blocks with weights [S, ..] of S stages: each applies to its group of B / S rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pretraining.config.training import TrainConfig
from pretraining.models.dropout import DropoutNoise
from pretraining.models.llama import LayerNorm, Linear, Llama, RMSNorm
from pretraining.parallel.xla.blocks import ScannedBlocks


def per_row(vector: Tensor, x: Tensor) -> Tensor:
    """Return the vectors [S, D] as they multiply x [B, .., D]."""
    rows = vector.unsqueeze(1).expand(-1, len(x) // len(vector), -1).flatten(0, 1)  # [B, D]
    return rows.view(len(x), *(1,) * (x.dim() - 2), -1)


def _rms_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    return RMSNorm.forward(norm, x, partial(per_row, x=x))


def _layer_norm(norm: LayerNorm, x: Tensor) -> Tensor:
    y = F.layer_norm(x.float(), x.shape[-1:], eps=norm.eps) * per_row(norm.weight.float(), x)
    y = y if norm.bias is None else y + per_row(norm.bias.float(), x)
    y = y if norm.factor == 1 else y * norm.factor
    return y.to(norm.result or x.dtype)


def _linear(projection: Linear, x: Tensor, noise: DropoutNoise | None = None) -> Tensor:
    y = projection.product(x, noise)
    return projection.add_bias(y, partial(per_row, x=y))


FORWARDS: dict[type[nn.Module], Callable[..., Tensor]] = {RMSNorm: _rms_norm, LayerNorm: _layer_norm, Linear: _linear}


class StagedBlocks(ScannedBlocks):
    """Runs blocks on the rows of all stages, each with its own layer."""

    leading = ("stage",)

    def __init__(self, config: TrainConfig, model: Llama, *arguments: Any) -> None:
        for module in model.model.layers.modules():
            for kind, forward in FORWARDS.items():
                if isinstance(module, kind):
                    module.forward = MethodType(forward, module)
        super().__init__(config, model, *arguments)

    def grouped(self, weight: Tensor) -> Tensor:
        """See ScannedBlocks. There is a matrix for each stage."""
        return weight
