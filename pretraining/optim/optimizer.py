"""The optimizer of a run: for each parameter its rule, its weight decay and its state.

Knows nothing of engines: they make the state where the parameters are, and run the updates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pretraining.config.optimizers import Hyperparameters, hyperparameters
from pretraining.config.training import TrainConfig
from pretraining.optim.precision import precision_of
from pretraining.optim.rules import RULES, Adam, Moment, Muon, Now, Rule, State


@dataclass
class Slot:
    """One parameter with what is kept of it. A stacked one, [layers, ...], counts as many tensors."""

    name: str
    weight: Tensor
    rule: Rule
    decay: float
    ndim: int  # dimensions of one tensor: of a stack, one less than it has
    state: State = field(default_factory=dict)

    def begin(self, make: Callable[[Slot, torch.Size, Moment], Tensor]) -> None:
        """Fill the state: `make` gets the shape of each moment, 1 where it holds one value for all."""
        for name, moment in self.rule.moments(self.ndim).items():
            self.state[name] = make(self, reduced(self.weight.shape, moment), moment)

    def updated(self, grad: Tensor, step: Tensor, rate: Tensor) -> tuple[Tensor, State]:
        """New weight and state in fp32, whatever they are kept in."""
        wide = {name: moment.float() for name, moment in self.state.items()}
        return self.rule.update(self.weight.float(), grad.float(), wide, Now(step, rate, self.decay, self.ndim))


class Optimizer:
    """Every parameter that takes a gradient. `updates` counts them; an engine says where it lives."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self.updates = torch.zeros(())


def reduced(shape: torch.Size, moment: Moment) -> torch.Size:
    """The shape of `moment` of a weight of this shape."""
    return torch.Size(1 if dim - len(shape) in moment.summed else extent for dim, extent in enumerate(shape))


def build_optimizer(config: TrainConfig, named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
    """The optimizer that `config` asks for, its state still to be made."""
    chosen = hyperparameters(config)
    slots = []
    for name, weight in named_parameters:
        if weight.requires_grad:
            decay = (chosen.weight_decay or 0.0) if config.norm_weight_decay or decays(name) else 0.0
            slots.append(Slot(name, weight, _rule(config, chosen, name), decay, weight.dim() - is_stacked(name)))
    return Optimizer(slots)


def _rule(config: TrainConfig, chosen: Hyperparameters, name: str) -> Rule:
    arguments = chosen.arguments
    if config.optimizer == "rprop":
        return RULES["rprop"](**arguments, first_step=chosen.learning_rate)
    if config.optimizer != "muon":
        return RULES[config.optimizer](**arguments)
    adam = {key: arguments[key] for key in ("beta1", "beta2", "eps")}
    # Embedding, head, norms and biases are no maps between hidden states: AdamW, as everybody who uses Muon does.
    if ".layers." not in name or not name.endswith("_proj.weight"):
        return Adam(**adam, decoupled=True)
    own = {key: value for key, value in arguments.items() if key not in adam}
    return Muon(**own, dtype=precision_of(config).products)


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter of this name: not to biases and norms.

    By name and not by the number of dimensions: with layers stacked, a norm's weight is [layers, hidden].
    """
    module, _, parameter = name.rpartition(".")
    return parameter != "bias" and "norm" not in module.rpartition(".")[2]


def is_stacked(name: str) -> bool:
    """Whether the parameter of this name is that of all layers, [layers, ...]: its name has no layer's number."""
    return bool(re.search(r"\.layers\.(?!\d)", name))
