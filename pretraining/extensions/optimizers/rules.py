"""Update rules of optimizers besides Adam and AdamW. See optim/rules.py for what a rule is.

Formulas: torch.optim's documentation for sgd, adamax, adadelta, adagrad, rmsprop and rprop; the others name their
source.
tests/extensions/test_optimizers.py compares each with its source.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pretraining.config.variants import model_shape, padded_vocabulary
from pretraining.extensions.optimizers.settings import OptimizersConfig
from pretraining.extensions.projections import is_hidden_matrix
from pretraining.models.init import VOCABULARIES
from pretraining.optim.precision import BF16, FP32, precision_of
from pretraining.optim.rules import (
    Adam,
    Moments,
    MomentSpec,
    UpdateContext,
    UpdateRule,
    one_minus_power,
)


def tensor_dims(ndim: int) -> tuple[int, ...]:
    """Return the dimensions of one tensor, counted from the last."""
    return tuple(range(-ndim, 0))


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
    and columns. OptimizersConfig.own_rate is its relative_step."""

    needs_full_tensor: ClassVar[bool] = True
    beta1: float | None
    eps: tuple[float, float]
    clip_threshold: float
    decay_rate: float
    scale_parameter: bool
    rows: int | None = None  # of a matrix over the vocabulary, without those that pad it; None: all

    def moment_specs(self, ndim: int) -> dict[str, MomentSpec]:
        first = {} if self.beta1 is None else {"exp_avg": MomentSpec()}
        if ndim < 2:
            return {"exp_avg_sq": MomentSpec(), **first}
        return {
            "exp_avg_sq_row": MomentSpec(reduced_dims=(-1,)),
            "exp_avg_sq_col": MomentSpec(reduced_dims=(-2,)),
            **first,
        }

    def _mean(self, x: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Mean over `dims`, with keepdim. Padding is 0. Divides last: shards of an uneven split have other counts."""
        counts = [min(x.shape[dim], self.rows) if self.rows and dim == -2 else x.shape[dim] for dim in dims]
        return x.sum(dims, keepdim=True) / math.prod(counts)

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        dims = tensor_dims(context.ndim)
        keep = 1 - context.step**self.decay_rate
        square = grad.square() + self.eps[0]
        measured = {"exp_avg_sq": square}
        if context.ndim > 1:
            measured = {"exp_avg_sq_row": self._mean(square, (-1,)), "exp_avg_sq_col": self._mean(square, (-2,))}
        new = {name: keep * moments[name] + (1 - keep) * mean for name, mean in measured.items()}
        if context.ndim < 2:
            update = grad * new["exp_avg_sq"].rsqrt()
        else:
            row, column = new["exp_avg_sq_row"], new["exp_avg_sq_col"]
            update = grad * (row / self._mean(row, (-2,))).rsqrt() * column.rsqrt()
        update = update / (self._mean(update.square(), dims).sqrt() / self.clip_threshold).clamp(min=1.0)
        rate = context.rate
        if self.scale_parameter:
            rate = rate * self._mean(weight.square(), dims).sqrt().clamp(min=self.eps[1])
        update = update * rate
        if self.beta1 is not None:
            update = new["exp_avg"] = self.beta1 * moments["exp_avg"] + (1 - self.beta1) * update
        return weight * (1 - rate * context.decay) - update, new


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


@dataclass(frozen=True)
class AdamWFp32(Adam):
    """NxD Core's AdamW_FP32OptimParams: epsilon outside the bias correction, decay applied to the updated weight."""

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        first = self.beta1 * moments["exp_avg"] + (1 - self.beta1) * grad
        second = self.beta2 * moments["exp_avg_sq"] + (1 - self.beta2) * grad.square()
        corrections = [one_minus_power(beta, context.step) for beta in (self.beta1, self.beta2)]
        rate = context.rate * corrections[1].sqrt() / corrections[0]
        weight = weight - rate * first / (second.sqrt() + self.eps)
        return weight * (1 - context.rate * context.decay), {"exp_avg": first, "exp_avg_sq": second}


@dataclass(frozen=True)
class Adamax(UpdateRule):
    moment_names = ("exp_avg", "exp_inf")
    beta1: float
    beta2: float
    eps: float

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        grad = grad + context.decay * weight
        first = self.beta1 * moments["exp_avg"] + (1 - self.beta1) * grad
        largest = torch.maximum(self.beta2 * moments["exp_inf"], grad.abs() + self.eps)
        weight = weight - context.rate / one_minus_power(self.beta1, context.step) * first / largest
        return weight, {"exp_avg": first, "exp_inf": largest}


@dataclass(frozen=True)
class NovoGrad(UpdateRule):
    """Ginsburg et al. 2019 as in NeMo: one second moment per tensor. luc: rate bounded by ||w|| / ||m||."""

    needs_full_tensor: ClassVar[bool] = True
    beta1: float
    beta2: float
    eps: float
    grad_averaging: bool
    luc: bool
    luc_trust: float
    luc_eps: float

    def moment_specs(self, ndim: int) -> dict[str, MomentSpec]:
        return {"exp_avg": MomentSpec(), "exp_avg_sq": MomentSpec(reduced_dims=tensor_dims(ndim))}

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        dims = tensor_dims(context.ndim)
        square = grad.square().sum(dims, keepdim=True)
        second = torch.where(context.step == 1, square, self.beta2 * moments["exp_avg_sq"] + (1 - self.beta2) * square)
        grad = grad / (second.sqrt() + self.eps) + context.decay * weight
        first = self.beta1 * moments["exp_avg"] + (1 - self.beta1 if self.grad_averaging else 1) * grad
        rate = context.rate
        if self.luc:
            norms = [x.square().sum(dims, keepdim=True).sqrt() for x in (weight, first)]
            rate = torch.minimum(self.luc_trust * norms[0] / (norms[1] + self.luc_eps), rate)
        return weight - rate * first, {"exp_avg": first, "exp_avg_sq": second}


@dataclass(frozen=True)
class Adagrad(UpdateRule):
    lr_decay: float
    initial_accumulator_value: float
    eps: float

    def moment_specs(self, ndim: int) -> dict[str, MomentSpec]:
        return {"sum": MomentSpec(initial=self.initial_accumulator_value)}

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        grad = grad + context.decay * weight
        total = moments["sum"] + grad.square()
        rate = context.rate / (1 + (context.step - 1) * self.lr_decay)
        return weight - rate * grad / (total.sqrt() + self.eps), {"sum": total}


@dataclass(frozen=True)
class Adadelta(UpdateRule):
    moment_names = ("square_avg", "acc_delta")
    rho: float
    eps: float

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        grad = grad + context.decay * weight
        square = self.rho * moments["square_avg"] + (1 - self.rho) * grad.square()
        delta = (moments["acc_delta"] + self.eps).sqrt() / (square + self.eps).sqrt() * grad
        deltas = self.rho * moments["acc_delta"] + (1 - self.rho) * delta.square()
        return weight - context.rate * delta, {"square_avg": square, "acc_delta": deltas}


@dataclass(frozen=True)
class RMSprop(UpdateRule):
    alpha: float
    eps: float
    momentum: float
    centered: bool

    def moment_specs(self, ndim: int) -> dict[str, MomentSpec]:
        names = ["square_avg"] + ["momentum_buffer"] * bool(self.momentum) + ["grad_avg"] * self.centered
        return {name: MomentSpec() for name in names}

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        grad = grad + context.decay * weight
        new = {"square_avg": self.alpha * moments["square_avg"] + (1 - self.alpha) * grad.square()}
        variance = new["square_avg"]
        if self.centered:
            new["grad_avg"] = self.alpha * moments["grad_avg"] + (1 - self.alpha) * grad
            variance = variance - new["grad_avg"].square()
        update = grad / (variance.sqrt() + self.eps)
        if self.momentum:
            update = new["momentum_buffer"] = self.momentum * moments["momentum_buffer"] + update
        return weight - context.rate * update, new


@dataclass(frozen=True)
class Rprop(UpdateRule):
    """Keeps a step size per element, initially `first_step`; the learning-rate schedule does not affect it."""

    etas: tuple[float, float]
    step_sizes: tuple[float, float]
    first_step: float

    def moment_specs(self, ndim: int) -> dict[str, MomentSpec]:
        return {"prev": MomentSpec(), "step_size": MomentSpec(initial=self.first_step)}

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        agreement = (grad * moments["prev"]).sign()
        factor = torch.where(agreement > 0, self.etas[1], torch.where(agreement < 0, self.etas[0], 1.0))
        size = (moments["step_size"] * factor).clamp(*self.step_sizes)
        grad = torch.where(agreement < 0, 0.0, grad)
        return weight - grad.sign() * size, {"prev": grad, "step_size": size}


@dataclass(frozen=True)
class OneBitAdam(UpdateRule):
    """Tang et al. 2021 as in DeepSpeed: Adam without bias correction, and compressed after `freeze_step` updates.

    Then the second moment stays, and of the first one remain the signs and one scale per tensor, its root mean square;
    what the compression removes is added to the next first moment. DeepSpeed compresses what each of several workers
    adds to the first moment; here it is compressed once, as by a single worker, so that no mesh changes the result.
    Elements that never had a gradient, such as rows of tokens that do not occur, have no sign (DeepSpeed's mask).
    """

    needs_full_tensor: ClassVar[bool] = True
    moment_names = ("exp_avg", "exp_avg_sq", "error")
    beta1: float
    beta2: float
    eps: float
    freeze_step: int

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        is_frozen = context.step > self.freeze_step
        first = self.beta1 * moments["exp_avg"] + (1 - self.beta1) * grad
        second = self.beta2 * moments["exp_avg_sq"] + (1 - self.beta2) * grad.square()
        second = torch.where(is_frozen, moments["exp_avg_sq"], second)
        compressed, error = self._compress(first + moments["error"], (second > 0).float(), tensor_dims(context.ndim))
        first = torch.where(is_frozen, compressed, first)
        weight = weight - context.rate * (first / (second.sqrt() + self.eps) + context.decay * weight)
        return weight, {"exp_avg": first, "exp_avg_sq": second, "error": torch.where(is_frozen, error, 0.0)}

    def _compress(self, value: Tensor, moves: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return one bit of each element times the root mean square, and the difference. moves: 1, or 0 for no bit."""
        squares = (value * moves).square().sum(dims, keepdim=True)
        scale = (squares / moves.sum(dims, keepdim=True).clamp(min=1)).sqrt()
        compressed = torch.where(value < 0, -scale, scale) * moves
        return compressed, (value - compressed) * moves


@dataclass(frozen=True)
class SM3(UpdateRule):
    """Anil et al. 2019 (SM3-II) as in GPT-NeoX: one accumulator per index of each dimension."""

    needs_full_tensor: ClassVar[bool] = True
    momentum: float
    beta: float
    eps: float

    def moment_specs(self, ndim: int) -> dict[str, MomentSpec]:
        accumulators = {f"accumulator_{i}": MomentSpec(reduced_dims=self._others(i, ndim)) for i in range(ndim)}
        return {**accumulators, **({"momentum_buffer": MomentSpec()} if self.momentum else {})}

    def _others(self, index: int, ndim: int) -> tuple[int, ...]:
        return tuple(dim for dim in tensor_dims(ndim) if dim != index - ndim)

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        smallest = moments["accumulator_0"]
        for i in range(1, context.ndim):
            smallest = torch.minimum(smallest, moments[f"accumulator_{i}"])
        square = grad.square()
        second = self.beta * smallest + (1 - self.beta) * square if self.beta else smallest + square
        new = {}
        for i in range(context.ndim):
            others = self._others(i, context.ndim)
            largest = second.amax(others, keepdim=True) if others else second
            new[f"accumulator_{i}"] = torch.maximum(moments[f"accumulator_{i}"], largest)
        update = (second + self.eps).rsqrt() * grad
        if self.momentum:
            update = self.momentum * moments["momentum_buffer"] + (1 - self.momentum) * update
            new["momentum_buffer"] = update
        return weight - context.rate * update, new


@dataclass(frozen=True)
class Madgrad(UpdateRule):
    """Defazio and Jelassi 2021, algorithm 1, with GPT-NeoX's decoupled weight decay (madgrad_wd)."""

    momentum: float
    eps: float

    def moment_specs(self, ndim: int) -> dict[str, MomentSpec]:
        return {"grad_sum_sq": MomentSpec(), "s": MomentSpec(), "x0": MomentSpec(initial=None)}

    def update(self, weight: Tensor, grad: Tensor, moments: Moments, context: UpdateContext) -> tuple[Tensor, Moments]:
        weight = weight * (1 - context.rate * context.decay)
        share = (context.rate + self.eps) * context.step.sqrt()
        squares = moments["grad_sum_sq"] + share * grad.square()
        total = moments["s"] + share * grad
        averaged = moments["x0"] - total / (squares ** (1 / 3) + self.eps)
        weight = self.momentum * weight + (1 - self.momentum) * averaged
        return weight, {"grad_sum_sq": squares, "s": total, "x0": moments["x0"]}


def _adafactor(*, relative_step: bool, warmup_init: bool, min_step: float, **arguments: Any) -> UpdateRule:
    """Drop the three arguments that OptimizersConfig.own_rate reads."""
    return Adafactor(**arguments)


UPDATE_RULES: dict[str, Callable[..., UpdateRule]] = {
    "sgd": SGD,
    "lion": Lion,
    "adamw_fp32": AdamWFp32,
    "adamax": Adamax,
    "adadelta": Adadelta,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
    "novograd": NovoGrad,
    "sm3": SM3,
    "madgrad_wd": Madgrad,
    "onebit_adam": OneBitAdam,
}


def rule_of(config: OptimizersConfig, name: str) -> UpdateRule | None:
    """Return the rule of the parameter of this name; None: one of the core's optimizers is chosen."""
    chosen = config.hyperparameters
    if config.optimizer == "muon":
        # Not in fp16, which has neither the squares of gradients nor most gradients
        return _muon(chosen.arguments, name, BF16 if precision_of(config).compute == BF16 else FP32)
    if config.optimizer == "rprop":
        return Rprop(**chosen.arguments, first_step=chosen.learning_rate)
    if config.optimizer == "adafactor":
        rows, is_padded = model_shape(config).vocab_size, name.removesuffix(".weight").endswith(VOCABULARIES)
        is_padded = is_padded and padded_vocabulary(config) > rows  # not the rows of a model of one's own
        return _adafactor(**chosen.arguments, rows=rows if is_padded else None)
    build = UPDATE_RULES.get(config.optimizer)
    return build(**chosen.arguments) if build else None


def _muon(arguments: dict[str, Any], name: str, dtype: torch.dtype) -> UpdateRule:
    """Return Muon for matrices that map hidden states to hidden states, and AdamW for all others.

    As in Moonlight and Keller Jordan's Muon: embedding, head, norms and biases are the others.
    """
    adam = {key: arguments[key] for key in ("beta1", "beta2", "eps")}
    if not is_hidden_matrix(name):
        return Adam(**adam, decoupled=True)
    muon = {key: value for key, value in arguments.items() if key not in adam}
    return Muon(**muon, dtype=dtype)
