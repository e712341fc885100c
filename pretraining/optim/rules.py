"""One update of one tensor, for every optimizer: pure functions of tensors, the same on every engine.

torch.optim does not serve here: most of its optimizers read the step count or the rate on the host, which stops a
compiled step, and none knows that a stacked tensor [layers, ...] is many. A rule sees weight, gradient and moments in
fp32 as whole tensors, however they are split over devices (XLA's, or DTensors), and gives new ones. What it sums over
a tensor, it sums over the last `now.ndim` dimensions, so that stacked layers stay apart.

Formulas: torch.optim's documentation for adam, adamax, adadelta, adagrad, rmsprop, rprop and sgd; the others name
their source. tests/optim/test_rules.py compares each with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]


class Now(NamedTuple):
    """What an update depends on besides its tensors."""

    step: Tensor  # this update's number, from 1, fp32 scalar
    rate: Tensor  # learning rate, fp32 scalar
    decay: float  # weight decay
    ndim: int  # dimensions of one tensor: the last ones


class Moment(NamedTuple):
    """One tensor of an optimizer's state: like its weight, but for dimensions along which it holds one value."""

    summed: tuple[int, ...] = ()  # counted from the last, -1
    initial: float | None = 0.0  # None: a copy of the weight


class Rule(Protocol):
    """An optimizer."""

    whole: ClassVar[bool]  # whether it looks at more of a tensor than one element at a time

    def moments(self, ndim: int) -> dict[str, Moment]:
        """The state it keeps for a tensor of so many dimensions."""
        ...

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        """The new weight and the new state, every tensor in the shape of the old one."""
        ...


def _powered(base: float, step: Tensor) -> Tensor:
    """1 - base^step, which in fp32 loses its digits for a base near 1 and early steps if it is taken literally."""
    return -torch.expm1(step * math.log(base)) if base else torch.ones_like(step)


def _all(ndim: int) -> tuple[int, ...]:
    return tuple(range(-ndim, 0))


def _mean(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The mean over `dims`, kept as 1. Divided last: shards of an uneven split have different counts."""
    return x.sum(dims, keepdim=True) / math.prod(x.shape[dim] for dim in dims)


# ---- Adam's kind


@dataclass(frozen=True)
class Adam:
    """Kingma and Ba 2015; decoupled: AdamW (Loshchilov and Hutter 2019)."""

    whole: ClassVar[bool] = False
    beta1: float
    beta2: float
    eps: float
    decoupled: bool = False

    def moments(self, ndim: int) -> dict[str, Moment]:
        return {"exp_avg": Moment(), "exp_avg_sq": Moment()}

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        if self.decoupled:
            weight = weight * (1 - now.rate * now.decay)
        elif now.decay:
            grad = grad + now.decay * weight
        first = self.beta1 * state["exp_avg"] + (1 - self.beta1) * grad
        second = self.beta2 * state["exp_avg_sq"] + (1 - self.beta2) * grad.square()
        scale = (second / _powered(self.beta2, now.step)).sqrt() + self.eps
        weight = weight - now.rate / _powered(self.beta1, now.step) * first / scale
        return weight, {"exp_avg": first, "exp_avg_sq": second}


@dataclass(frozen=True)
class AdamWFp32(Adam):
    """NxD Core's AdamW_FP32OptimParams: epsilon outside the bias correction, decay of the updated weight."""

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        first = self.beta1 * state["exp_avg"] + (1 - self.beta1) * grad
        second = self.beta2 * state["exp_avg_sq"] + (1 - self.beta2) * grad.square()
        corrected = now.rate * _powered(self.beta2, now.step).sqrt() / _powered(self.beta1, now.step)
        weight = weight - corrected * first / (second.sqrt() + self.eps)
        return weight * (1 - now.rate * now.decay), {"exp_avg": first, "exp_avg_sq": second}


@dataclass(frozen=True)
class Adamax:
    whole: ClassVar[bool] = False
    beta1: float
    beta2: float
    eps: float

    def moments(self, ndim: int) -> dict[str, Moment]:
        return {"exp_avg": Moment(), "exp_inf": Moment()}

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        grad = grad + now.decay * weight
        first = self.beta1 * state["exp_avg"] + (1 - self.beta1) * grad
        largest = torch.maximum(self.beta2 * state["exp_inf"], grad.abs() + self.eps)
        weight = weight - now.rate / _powered(self.beta1, now.step) * first / largest
        return weight, {"exp_avg": first, "exp_inf": largest}


@dataclass(frozen=True)
class NovoGrad:
    """Ginsburg et al. 2019 as NeMo has it: one second moment per tensor. luc: the rate bounded by ||w|| / ||m||."""

    whole: ClassVar[bool] = True
    beta1: float
    beta2: float
    eps: float
    grad_averaging: bool
    luc: bool
    luc_trust: float
    luc_eps: float

    def moments(self, ndim: int) -> dict[str, Moment]:
        return {"exp_avg": Moment(), "exp_avg_sq": Moment(summed=_all(ndim))}

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        dims = _all(now.ndim)
        square = grad.square().sum(dims, keepdim=True)
        second = torch.where(now.step == 1, square, self.beta2 * state["exp_avg_sq"] + (1 - self.beta2) * square)
        grad = grad / (second.sqrt() + self.eps) + now.decay * weight
        first = self.beta1 * state["exp_avg"] + (1 - self.beta1 if self.grad_averaging else 1) * grad
        rate = now.rate
        if self.luc:
            norms = [x.square().sum(dims, keepdim=True).sqrt() for x in (weight, first)]
            rate = torch.minimum(self.luc_trust * norms[0] / (norms[1] + self.luc_eps), rate)
        return weight - rate * first, {"exp_avg": first, "exp_avg_sq": second}


@dataclass(frozen=True)
class Lion:
    """Chen et al. 2023, algorithm 2."""

    whole: ClassVar[bool] = False
    beta1: float
    beta2: float

    def moments(self, ndim: int) -> dict[str, Moment]:
        return {"exp_avg": Moment()}

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        first = state["exp_avg"]
        direction = (self.beta1 * first + (1 - self.beta1) * grad).sign()
        weight = weight * (1 - now.rate * now.decay) - now.rate * direction
        return weight, {"exp_avg": self.beta2 * first + (1 - self.beta2) * grad}


# ---- Sums and means of squares


@dataclass(frozen=True)
class Adagrad:
    whole: ClassVar[bool] = False
    lr_decay: float
    initial_accumulator_value: float
    eps: float

    def moments(self, ndim: int) -> dict[str, Moment]:
        return {"sum": Moment(initial=self.initial_accumulator_value)}

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        grad = grad + now.decay * weight
        total = state["sum"] + grad.square()
        rate = now.rate / (1 + (now.step - 1) * self.lr_decay)
        return weight - rate * grad / (total.sqrt() + self.eps), {"sum": total}


@dataclass(frozen=True)
class Adadelta:
    whole: ClassVar[bool] = False
    rho: float
    eps: float

    def moments(self, ndim: int) -> dict[str, Moment]:
        return {"square_avg": Moment(), "acc_delta": Moment()}

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        grad = grad + now.decay * weight
        square = self.rho * state["square_avg"] + (1 - self.rho) * grad.square()
        delta = (state["acc_delta"] + self.eps).sqrt() / (square + self.eps).sqrt() * grad
        deltas = self.rho * state["acc_delta"] + (1 - self.rho) * delta.square()
        return weight - now.rate * delta, {"square_avg": square, "acc_delta": deltas}


@dataclass(frozen=True)
class RMSprop:
    whole: ClassVar[bool] = False
    alpha: float
    eps: float
    momentum: float
    centered: bool

    def moments(self, ndim: int) -> dict[str, Moment]:
        names = ["square_avg"] + ["momentum_buffer"] * bool(self.momentum) + ["grad_avg"] * self.centered
        return {name: Moment() for name in names}

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        grad = grad + now.decay * weight
        new = {"square_avg": self.alpha * state["square_avg"] + (1 - self.alpha) * grad.square()}
        variance = new["square_avg"]
        if self.centered:
            new["grad_avg"] = self.alpha * state["grad_avg"] + (1 - self.alpha) * grad
            variance = variance - new["grad_avg"].square()
        update = grad / (variance.sqrt() + self.eps)
        if self.momentum:
            update = new["momentum_buffer"] = self.momentum * state["momentum_buffer"] + update
        return weight - now.rate * update, new


@dataclass(frozen=True)
class Rprop:
    """Step sizes of its own, which begin at `first_step`; the learning rate's curve does not reach it."""

    whole: ClassVar[bool] = False
    etas: tuple[float, float]
    step_sizes: tuple[float, float]
    first_step: float

    def moments(self, ndim: int) -> dict[str, Moment]:
        return {"prev": Moment(), "step_size": Moment(initial=self.first_step)}

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        agreement = (grad * state["prev"]).sign()
        factor = torch.where(agreement > 0, self.etas[1], torch.where(agreement < 0, self.etas[0], 1.0))
        size = (state["step_size"] * factor).clamp(*self.step_sizes)
        grad = torch.where(agreement < 0, 0.0, grad)
        return weight - grad.sign() * size, {"prev": grad, "step_size": size}


@dataclass(frozen=True)
class SGD:
    whole: ClassVar[bool] = False
    momentum: float
    dampening: float
    nesterov: bool

    def moments(self, ndim: int) -> dict[str, Moment]:
        return {"momentum_buffer": Moment()} if self.momentum else {}

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        grad = grad + now.decay * weight
        if not self.momentum:
            return weight - now.rate * grad, {}
        fresh = torch.where(now.step == 1, 1.0, 1 - self.dampening)
        buffer = self.momentum * state["momentum_buffer"] + fresh * grad
        direction = grad + self.momentum * buffer if self.nesterov else buffer
        return weight - now.rate * direction, {"momentum_buffer": buffer}


# ---- Rows and columns


@dataclass(frozen=True)
class Adafactor:
    """Shazeer and Stern 2018 as NeMo and fairseq have it: of a matrix, the second moment as its rows' times its
    columns' mean. relative_step is the schedule's business (optim.schedule)."""

    whole: ClassVar[bool] = True
    beta1: float | None
    eps: tuple[float, float]
    clip_threshold: float
    decay_rate: float
    scale_parameter: bool

    def moments(self, ndim: int) -> dict[str, Moment]:
        first = {} if self.beta1 is None else {"exp_avg": Moment()}
        if ndim < 2:
            return {"exp_avg_sq": Moment(), **first}
        return {"exp_avg_sq_row": Moment(summed=(-1,)), "exp_avg_sq_col": Moment(summed=(-2,)), **first}

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        everything = _all(now.ndim)
        keep = 1 - now.step**self.decay_rate
        square = grad.square() + self.eps[0]
        measured = {"exp_avg_sq": square}
        if now.ndim > 1:
            measured = {"exp_avg_sq_row": _mean(square, (-1,)), "exp_avg_sq_col": _mean(square, (-2,))}
        new = {name: keep * state[name] + (1 - keep) * mean for name, mean in measured.items()}
        if now.ndim < 2:
            update = grad * new["exp_avg_sq"].rsqrt()
        else:
            row, column = new["exp_avg_sq_row"], new["exp_avg_sq_col"]
            update = grad * (row / _mean(row, (-2,))).rsqrt() * column.rsqrt()
        update = update / (_mean(update.square(), everything).sqrt() / self.clip_threshold).clamp(min=1.0)
        rate = now.rate
        if self.scale_parameter:
            rate = rate * _mean(weight.square(), everything).sqrt().clamp(min=self.eps[1])
        update = update * rate
        if self.beta1 is not None:
            update = new["exp_avg"] = self.beta1 * state["exp_avg"] + (1 - self.beta1) * update
        return weight * (1 - rate * now.decay) - update, new


@dataclass(frozen=True)
class SM3:
    """Anil et al. 2019 (SM3-II) as GPT-NeoX has it: one accumulator per index of each dimension."""

    whole: ClassVar[bool] = True
    momentum: float
    beta: float
    eps: float

    def moments(self, ndim: int) -> dict[str, Moment]:
        kept = {f"accumulator_{i}": Moment(summed=self._others(i, ndim)) for i in range(ndim)}
        return {**kept, **({"momentum_buffer": Moment()} if self.momentum else {})}

    def _others(self, index: int, ndim: int) -> tuple[int, ...]:
        return tuple(dim for dim in _all(ndim) if dim != index - ndim)

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        least = state["accumulator_0"]
        for i in range(1, now.ndim):
            least = torch.minimum(least, state[f"accumulator_{i}"])
        square = grad.square()
        second = self.beta * least + (1 - self.beta) * square if self.beta else least + square
        new = {}
        for i in range(now.ndim):
            others = self._others(i, now.ndim)
            most = second.amax(others, keepdim=True) if others else second
            new[f"accumulator_{i}"] = most if self.beta else torch.maximum(state[f"accumulator_{i}"], most)
        update = (second + self.eps).rsqrt() * grad
        if self.momentum:
            update = self.momentum * state["momentum_buffer"] + (1 - self.momentum) * update
            new["momentum_buffer"] = update
        return weight - now.rate * update, new


@dataclass(frozen=True)
class Madgrad:
    """Defazio and Jelassi 2021, algorithm 1, with GPT-NeoX's decoupled weight decay (madgrad_wd)."""

    whole: ClassVar[bool] = False
    momentum: float
    eps: float

    def moments(self, ndim: int) -> dict[str, Moment]:
        return {"grad_sum_sq": Moment(), "s": Moment(), "x0": Moment(initial=None)}

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        weight = weight * (1 - now.rate * now.decay)
        share = (now.rate + self.eps) * now.step.sqrt()
        squares = state["grad_sum_sq"] + share * grad.square()
        total = state["s"] + share * grad
        averaged = state["x0"] - total / (squares ** (1 / 3) + self.eps)
        weight = self.momentum * weight + (1 - self.momentum) * averaged
        return weight, {"grad_sum_sq": squares, "s": total, "x0": state["x0"]}


@dataclass(frozen=True)
class Muon:
    """Jordan et al. 2024: momentum made orthogonal, at the root mean square of an AdamW update (Liu et al. 2025)."""

    whole: ClassVar[bool] = True
    momentum: float
    nesterov: bool
    ns_steps: int
    dtype: torch.dtype  # of the matrix products

    def moments(self, ndim: int) -> dict[str, Moment]:
        return {"momentum_buffer": Moment()}

    def update(self, weight: Tensor, grad: Tensor, state: State, now: Now) -> tuple[Tensor, State]:
        buffer = self.momentum * state["momentum_buffer"] + (1 - self.momentum) * grad
        direction = self.momentum * buffer + (1 - self.momentum) * grad if self.nesterov else buffer
        scale = 0.2 * math.sqrt(max(weight.shape[-2:]))
        weight = weight * (1 - now.rate * now.decay) - now.rate * scale * self._orthogonal(direction)
        return weight, {"momentum_buffer": buffer}

    def _orthogonal(self, x: Tensor) -> Tensor:
        """Nearly U V^T of x [.., m, n] = U S V^T, by Newton and Schulz's quintic iteration on the shorter side."""
        tall = x.shape[-2] > x.shape[-1]
        y = (x.mT if tall else x).to(self.dtype)
        y = y / (y.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
        for _ in range(self.ns_steps):
            gram = y @ y.mT
            y = 3.4445 * y + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ y
        return (y.mT if tall else y).to(x.dtype)


def _adafactor(*, relative_step: bool, warmup_init: bool, min_step: float, **arguments: Any) -> Rule:
    """The three that are the schedule's are left to it."""
    return Adafactor(**arguments)


RULES: dict[str, Callable[..., Rule]] = {
    "adamw": partial(Adam, decoupled=True),
    "adamw_fp32": AdamWFp32,
    "adam": Adam,
    "adamax": Adamax,
    "adadelta": Adadelta,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
    "rprop": Rprop,
    "sgd": SGD,
    "novograd": NovoGrad,
    "adafactor": _adafactor,
    "sm3": SM3,
    "madgrad_wd": Madgrad,
    "lion": Lion,
    "muon": Muon,
}
