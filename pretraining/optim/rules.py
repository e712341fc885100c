"""What an update rule is, and that of Adam and AdamW: pure functions of tensors, used by both engines.

torch.optim does not serve here: most of its optimizers read the step count or the learning rate on the host, which
interrupts a compiled step, and none can treat a stacked tensor [layers, ...] as `layers` tensors. A rule receives
weight, gradient and moments in fp32 as full tensors, however they are sharded (by XLA, or as DTensors), and returns new
ones. It reduces over the last `context.ndim` dimensions, so that stacked layers stay independent. What takes many
products of one matrix runs through `context.on_full`.

Other rules are in extensions/optimizers. tests/optim/test_rules.py compares each with its source.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

Moments = dict[str, Tensor]
# Returns function(matrices), computed where a device has full matrices, in the sharding of `matrices`, [.., m, n].
OnFull = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class UpdateContext(NamedTuple):
    """What an update depends on besides its tensors."""

    step: Tensor  # number of this update, from 1, fp32 scalar
    rate: Tensor  # learning rate, fp32 scalar
    decay: float  # weight decay
    ndim: int  # dimensions of one tensor: the last ones
    on_full: OnFull


class MomentSpec(NamedTuple):
    """Shape and initial value of one moment. Its shape is the weight's, with extent 1 along `reduced_dims`."""

    reduced_dims: tuple[int, ...] = ()  # negative: counted from the last, -1
    initial: float | None = 0.0  # None: a copy of the weight


class UpdateRule(ABC):
    """The arithmetic of one optimizer."""

    needs_full_tensor: ClassVar[bool] = False  # whether an element's update depends on other elements of its tensor
    moment_names: ClassVar[tuple[str, ...]] = ()  # of moments in the shape of the weight, from 0

    def moment_specs(self, ndim: int) -> dict[str, MomentSpec]:
        """Return the moments of a tensor with `ndim` dimensions, by name."""
        return dict.fromkeys(self.moment_names, MomentSpec())

    @abstractmethod
    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        """Return the new weight and moments, in the shapes of the old ones."""


def one_minus_power(base: float, step: Tensor) -> Tensor:
    """Return 1 - base^step by expm1: the literal formula loses fp32 digits for a base near 1 and early steps."""
    return -torch.expm1(step * math.log(base)) if base else torch.ones_like(step)


@dataclass(frozen=True)
class Adam(UpdateRule):
    """Kingma and Ba 2015; decoupled: AdamW (Loshchilov and Hutter 2019)."""

    moment_names = ("exp_avg", "exp_avg_sq")
    beta1: float
    beta2: float
    eps: float
    decoupled: bool = False

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        if self.decoupled:
            weight = weight * (1 - context.rate * context.decay)
        elif context.decay:
            grad = grad + context.decay * weight
        first = self.beta1 * moments["exp_avg"] + (1 - self.beta1) * grad
        second = self.beta2 * moments["exp_avg_sq"] + (1 - self.beta2) * grad.square()
        scale = (second / one_minus_power(self.beta2, context.step)).sqrt() + self.eps
        weight = weight - context.rate / one_minus_power(self.beta1, context.step) * first / scale
        return weight, {"exp_avg": first, "exp_avg_sq": second}
