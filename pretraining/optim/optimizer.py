"""The optimizer of a run: the update rule, weight decay and moments of each parameter.

Does not depend on engines: an engine creates the moments where the parameters are and runs the updates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pretraining.config.training import TrainConfig
from pretraining.optim.rules import Adam, Moments, MomentSpec, OnFull, UpdateContext, UpdateRule


@dataclass
class ParameterState:
    """One parameter and its optimizer state. A stacked parameter, [layers, ...], counts as `layers` tensors."""

    name: str
    weight: Tensor
    rule: UpdateRule
    decay: float
    ndim: int  # dimensions of one tensor: one less than `weight` has where layers are stacked
    rate_scale: float = 1.0  # factor of the learning rate, which does not change the weight decay
    followers: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)  # see TrainConfig
    moments: Moments = field(default_factory=dict)

    def moment_specs(self) -> dict[str, MomentSpec]:
        """Return the rule's moments and the followers of the weight, by name."""
        return {**self.rule.moment_specs(self.ndim), **dict.fromkeys(self.followers, MomentSpec(initial=None))}

    def initialize_moments(self, make: Callable[[ParameterState, torch.Size, MomentSpec], Tensor]) -> None:
        """Create the moments; `make` gets the shape of each, with extent 1 along the dimensions that it reduces."""
        for name, spec in self.moment_specs().items():
            self.moments[name] = make(self, moment_shape(self.weight.shape, spec), spec)

    def compute_update(self, grad: Tensor, step: Tensor, rate: Tensor, on_full: OnFull) -> tuple[Tensor, Moments]:
        """Return the new weight and moments in fp32, whatever their stored dtypes."""
        moments = {name: moment.float() for name, moment in self.moments.items()}
        rate = rate if self.rate_scale == 1 else rate * self.rate_scale
        context = UpdateContext(step, rate, self.decay / self.rate_scale, self.ndim, on_full)
        weight, updated = self.rule.update(self.weight.float(), grad.float(), moments, context)
        return weight, updated | {name: follow(moments[name], weight) for name, follow in self.followers.items()}


class Optimizer:
    """The state of every trained parameter. `updates` counts the applied updates; an engine moves it to its device."""

    def __init__(self, parameters: list[ParameterState]) -> None:
        self.parameters = parameters
        self.updates = torch.zeros(())


def moment_shape(shape: torch.Size, spec: MomentSpec) -> torch.Size:
    """Shape of a moment of a weight of this shape."""
    return torch.Size(1 if dim - len(shape) in spec.reduced_dims else extent for dim, extent in enumerate(shape))


def build_optimizer(config: TrainConfig, named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
    """Return the configured optimizer without moments, which an engine creates."""
    chosen = config.hyperparameters
    parameters = []
    for name, weight in named_parameters:
        if weight.requires_grad:
            decay = (chosen.weight_decay or 0.0) if config.norm_weight_decay or decays(name) else 0.0
            ndim = weight.dim() - is_stacked(name)
            rule: UpdateRule | None = config.update_rule(name)
            rule = rule or Adam(**chosen.arguments, decoupled=config.optimizer == "adamw")
            scale = config.rate_scale(name)
            parameters.append(ParameterState(name, weight, rule, decay, ndim, scale, config.followers()))
    return Optimizer(parameters)


def decays(name: str) -> bool:
    """Return whether weight decay applies to the parameter of this name: not to biases and norms.

    By name and not by the number of dimensions, because a norm's weight is [layers, hidden] where layers are stacked.
    """
    module, _, parameter = name.rpartition(".")
    return parameter != "bias" and "norm" not in module.rpartition(".")[2]


def is_stacked(name: str) -> bool:
    """Return whether this is the name of a stacked parameter, [layers, ...]: it has no layer number."""
    return bool(re.search(r"\.layers\.(?!\d)", name))
