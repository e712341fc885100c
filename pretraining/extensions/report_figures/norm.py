"""The norm of the parameters on each engine."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def parameter_norm(trainee: Any) -> float:
    """Return the L2 norm of the unsharded parameters of a parallel.engine.Trainee. Waits for the device.

    On the xla engine this is a graph of its own, which the first call compiles.
    """
    if trainee.engine.name == "xla":
        # in fp32: torch's get_total_norm rounds the norm of each bf16 tensor to bf16
        norms = [torch.linalg.vector_norm(weight, dtype=torch.float32) for weight in trainee.model.parameters()]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        trainee.sync()
        return norm.item()
    from pretraining.parallel.torch.step import reduce_over_processes

    shards = trainee.shards
    square = trainee.step.power_sum({name: shards.local(name) for name in shards.weights})
    reduce_over_processes(square)
    return square.sqrt().item()
