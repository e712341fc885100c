"""AdamW as the configuration asks for it: one group of parameters that decay, one of those that do not.

Knows nothing of engines; which implementation of torch's AdamW runs is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from pretraining.config.training import TrainConfig
from pretraining.optim.schedule import learning_rate


def build_optimizer(
    config: TrainConfig,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    capturable: bool = False,
    fused: bool | None = None,
    foreach: bool | None = None,
) -> torch.optim.AdamW:
    """AdamW over every parameter that takes a gradient, at the rate of the first update.

    capturable keeps the step count on the device (XLA, CUDA graphs); it is needed before a group's "lr" may be a
    tensor in a compiled step. fused and foreach are torch's; None lets torch choose, and XLA needs foreach=False.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, weight in named_parameters:
        if weight.requires_grad:
            (decayed if config.norm_weight_decay or decays(name) else exempt).append(weight)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=learning_rate(config, 0),
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.optimizer_eps,
        capturable=capturable,
        fused=fused,
        foreach=foreach,
    )


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter of this name: not to biases and norms.

    By name and not by the number of dimensions: with layers stacked, a norm's weight is [layers, hidden].
    """
    module, _, parameter = name.rpartition(".")
    return parameter != "bias" and "norm" not in module.rpartition(".")[2]
