"""The norm of the parameters on each engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


@torch.no_grad()
def parameter_norm(trainee: Any) -> float:
    """Return the L2 norm of the unsharded parameters of a parallel.engine.Trainee. Waits for the device.

    On the xla engine this is a graph of its own, which the first call compiles.
    """
    if trainee.engine.name == "xla":
        norm = nn.utils.get_total_norm(list(trainee.model.parameters()), foreach=False)
        trainee.sync()
        return norm.item()
    from pretraining.parallel.torch.step import reduce_over_processes

    shards = trainee.shards
    square = trainee.step.power_sum({name: shards.local(name) for name in shards.weights})
    reduce_over_processes(square)
    return square.sqrt().item()
