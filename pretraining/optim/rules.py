"""Update rules of the usual optimizers: pure functions of tensors, used by both engines.

torch.optim does not serve here: most of its optimizers read the step count or the learning rate on the host, which
interrupts a compiled step, and none can treat a stacked tensor [layers, ...] as `layers` tensors. A rule receives
weight, gradient and moments in fp32 as full tensors, however they are sharded (by XLA, or as DTensors), and returns new
ones. It reduces over the last `context.ndim` dimensions, so that stacked layers stay independent. What takes many
products of one matrix runs through `context.on_full`.

Formulas: torch.optim's documentation for adam and sgd; the others name their source. tests/optim/test_rules.py compares
each with its source.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

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


def tensor_dims(ndim: int) -> tuple[int, ...]:
    """Return the dimensions of one tensor, counted from the last."""
    return tuple(range(-ndim, 0))


def _mean(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Mean over `dims`, with keepdim. Divides last, because shards of an uneven split have different counts."""
    return x.sum(dims, keepdim=True) / math.prod(x.shape[dim] for dim in dims)


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


@dataclass(frozen=True)
class Lion(UpdateRule):
    """Chen et al. 2023, algorithm 2."""

    moment_names = ("exp_avg",)
    beta1: float
    beta2: float

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        first = moments["exp_avg"]
        direction = (self.beta1 * first + (1 - self.beta1) * grad).sign()
        weight = weight * (1 - context.rate * context.decay) - context.rate * direction
        return weight, {"exp_avg": self.beta2 * first + (1 - self.beta2) * grad}


@dataclass(frozen=True)
class SGD(UpdateRule):
    momentum: float
    dampening: float
    nesterov: bool

    def moment_specs(self, ndim: int) -> dict[str, MomentSpec]:
        return {"momentum_buffer": MomentSpec()} if self.momentum else {}

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        grad = grad + context.decay * weight
        if not self.momentum:
            return weight - context.rate * grad, {}
        fresh = torch.where(context.step == 1, 1.0, 1 - self.dampening)
        buffer = self.momentum * moments["momentum_buffer"] + fresh * grad
        direction = grad + self.momentum * buffer if self.nesterov else buffer
        return weight - context.rate * direction, {"momentum_buffer": buffer}


@dataclass(frozen=True)
class Adafactor(UpdateRule):
    """Shazeer and Stern 2018 as in NeMo and fairseq: the second moment of a matrix is factored into means of its rows
    and columns. optim.schedule implements relative_step."""

    needs_full_tensor: ClassVar[bool] = True
    beta1: float | None
    eps: tuple[float, float]
    clip_threshold: float
    decay_rate: float
    scale_parameter: bool

    def moment_specs(self, ndim: int) -> dict[str, MomentSpec]:
        first = {} if self.beta1 is None else {"exp_avg": MomentSpec()}
        if ndim < 2:
            return {"exp_avg_sq": MomentSpec(), **first}
        return {
            "exp_avg_sq_row": MomentSpec(reduced_dims=(-1,)),
            "exp_avg_sq_col": MomentSpec(reduced_dims=(-2,)),
            **first,
        }

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        dims = tensor_dims(context.ndim)
        keep = 1 - context.step**self.decay_rate
        square = grad.square() + self.eps[0]
        measured = {"exp_avg_sq": square}
        if context.ndim > 1:
            measured = {"exp_avg_sq_row": _mean(square, (-1,)), "exp_avg_sq_col": _mean(square, (-2,))}
        new = {name: keep * moments[name] + (1 - keep) * mean for name, mean in measured.items()}
        if context.ndim < 2:
            update = grad * new["exp_avg_sq"].rsqrt()
        else:
            row, column = new["exp_avg_sq_row"], new["exp_avg_sq_col"]
            update = grad * (row / _mean(row, (-2,))).rsqrt() * column.rsqrt()
        update = update / (_mean(update.square(), dims).sqrt() / self.clip_threshold).clamp(min=1.0)
        rate = context.rate
        if self.scale_parameter:
            rate = rate * _mean(weight.square(), dims).sqrt().clamp(min=self.eps[1])
        update = update * rate
        if self.beta1 is not None:
            update = new["exp_avg"] = self.beta1 * moments["exp_avg"] + (1 - self.beta1) * update
        return weight * (1 - rate * context.decay) - update, new


@dataclass(frozen=True)
class Muon(UpdateRule):
    """Jordan et al. 2024: orthogonalised momentum, scaled to the RMS of an AdamW update (Liu et al. 2025)."""

    moment_names = ("momentum_buffer",)
    needs_full_tensor: ClassVar[bool] = True
    momentum: float
    nesterov: bool
    ns_steps: int
    dtype: torch.dtype  # of the matrix products

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        buffer = self.momentum * moments["momentum_buffer"] + (1 - self.momentum) * grad
        direction = self.momentum * buffer + (1 - self.momentum) * grad if self.nesterov else buffer
        scale = 0.2 * math.sqrt(max(weight.shape[-2:]))
        orthogonal = context.on_full(self._orthogonal, direction.to(self.dtype)).to(direction.dtype)
        update = context.rate * scale * orthogonal
        return weight * (1 - context.rate * context.decay) - update, {"momentum_buffer": buffer}

    def _orthogonal(self, x: Tensor) -> Tensor:
        """Approximate U V^T of x [.., m, n] = U S V^T by a quintic Newton-Schulz iteration on the shorter side."""
        tall = x.shape[-2] > x.shape[-1]
        y = x.mT if tall else x
        y = y / (y.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
        for _ in range(self.ns_steps):
            gram = y @ y.mT
            y = 3.4445 * y + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ y
        return y.mT if tall else y


def _adafactor(*, relative_step: bool, warmup_init: bool, min_step: float, **arguments: Any) -> UpdateRule:
    """Drop the three arguments that optim.schedule reads."""
    return Adafactor(**arguments)


UPDATE_RULES: dict[str, Callable[..., UpdateRule]] = {
    "adamw": partial(Adam, decoupled=True),
    "adam": Adam,
    "sgd": SGD,
    "adafactor": _adafactor,
    "lion": Lion,
    "muon": Muon,
}
