"""Formulas of further learning rate schedules: see config/schedules.py.

Formulas: NeMo 1.14 `core/optim/lr_scheduler.py` unless a docstring names another source. After its total every schedule
keeps its last value (GPT-NeoX's cosine rises again) unless its docstring says what follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pretraining.config.schedules import Curve, Rate, after_warmup

# ---- fms-fsdp and Hugging Face


def fms_annealing(step: int, s: Curve) -> float:
    """fms-fsdp's straight line from the peak at step 0 to 0 at the total; the last update still has peak / total."""
    return s.peak * max(1 - step / s.total, 0.0)


def linear_warmup_decay(step: int, s: Curve) -> float:
    """Hugging Face's linear schedule (NxDT's `LinearAnnealingWithWarmUp`): from 0 at step 0 to the peak, and to 0."""
    if step < s.warmup:
        return s.peak * step / max(1, s.warmup)
    return s.peak * max(0.0, (s.total - step) / max(1, s.total - s.warmup))


# ---- NeMo


@after_warmup
def inverse_sqrt(step: int, s: Curve) -> float:
    """`InverseSquareRootAnnealing`: peak / sqrt((step + 1) / (warmup + 1)); after the total, the floor."""
    return s.floor if step > s.total else s.peak / math.sqrt((step + 1) / (s.warmup + 1))


@after_warmup
def poly(step: int, s: Curve) -> float:
    """`PolynomialDecayAnnealing`: (peak - floor) (1 - share done)^power + floor; with lr_cycle, again and again.

    NeMo, which has no steps after its total, never begins again.
    """
    return polynomial(step, s, s.warmup)


def polynomial(step: int, s: Curve, begin: float) -> float:
    """Return the rate of a polynomial that begins at step `begin`."""
    done, length = step - begin, s.total - begin
    if s.more["lr_cycle"]:
        length *= max(1, math.ceil(done / length))
    return (s.peak - s.floor) * (1 - min(done, length) / length) ** s.more["lr_power"] + s.floor


@after_warmup
def square(step: int, s: Curve) -> float:
    """`SquareAnnealing`: peak x (the share that is left)^2, at least the floor."""
    return _annealed(step, s, lambda left: s.peak * left**2)


@after_warmup
def square_root(step: int, s: Curve) -> float:
    """`SquareRootAnnealing`: peak x sqrt((total - step) / total), which the warm-up does not shift."""
    return max(s.peak * math.sqrt(max(s.total - step, 0) / s.total), s.floor)


@after_warmup
def warmup_annealing(step: int, s: Curve) -> float:
    """`WarmupAnnealing`: a straight line from the peak to the floor."""
    return _annealed(step, s, lambda left: s.floor + left * (s.peak - s.floor))


def _annealed(step: int, s: Curve, value: Callable[[float], float]) -> float:
    """`value` of the share of the steps after the warm-up that is left, 1 to 0; at least the floor."""
    return max(value(max(s.total - step, 0) / (s.total - s.warmup)), s.floor)


def noam(step: int, s: Curve) -> float:
    """`NoamAnnealing` (Vaswani et al. 2017): peak / sqrt(d_model) x min(step^-0.5, step / warmup^1.5), without end."""
    count = max(1, step)
    slope = min(count**-0.5, count * s.warmup**-1.5) if s.warmup else count**-0.5
    rate = s.peak * s.more["lr_d_model"] ** -0.5 * slope
    return max(rate, s.floor) if count > s.warmup else rate


@after_warmup
def noam_hold(step: int, s: Curve) -> float:
    """`NoamHoldAnnealing`: peak for `hold` steps, then peak x (warmup / (step - hold))^rate; then the floor."""
    if step < s.warmup + s.hold:
        return s.peak
    if step > s.total:
        return s.floor
    exponent = s.more["lr_decay_rate"]
    return max(s.peak * max(1, s.warmup**exponent) / max(1, (step - s.hold) ** exponent), s.floor)


@after_warmup
def poly_hold(step: int, s: Curve) -> float:
    """`PolynomialHoldDecayAnnealing`: poly after `hold` steps at the peak."""
    begin = s.warmup + s.hold
    return s.peak if step < begin else polynomial(step, s, begin)


# ---- torch.optim


def step_decay(step: int, s: Curve) -> float:
    """torch's StepLR, counted in steps: peak x gamma^(step // step_size)."""
    return s.peak * s.more["lr_gamma"] ** (step // s.more["lr_step_size"])


def exponential_lr(step: int, s: Curve) -> float:
    """torch's ExponentialLR, counted in steps: peak x gamma^step."""
    return s.peak * s.more["lr_gamma"] ** step


# ---- Stable LM 2 (Bellagente et al. 2024, section 2.4)


def hybrid_cosine_inv_sqrt(step: int, s: Curve) -> float:
    """A cosine of period `total` to its quarter, then a / sqrt(step + b) with the same value and slope there.

    Before it a linear warm-up, which the cosine's argument includes; in the last `cooldown` steps of the run a straight
    line to 0 at its end.
    """
    last, cooldown = s.more["num_steps"], s.more["lr_cooldown_steps"]
    if cooldown and step > last - cooldown:
        return hybrid_cosine_inv_sqrt(last - cooldown, s) * max(last - step, 0) / cooldown
    if step < s.warmup:
        return s.peak * step / s.warmup
    half = (s.peak - s.floor) / 2
    if not half or step <= s.total / 4:
        return s.floor + half * (1 + math.cos(2 * math.pi * step / s.total))
    middle = s.floor + half  # the rate at the quarter
    shifted = middle * s.total / (4 * math.pi * half)  # quarter + b, by the slope -2 pi half / total
    return middle * math.sqrt(shifted / (step - s.total / 4 + shifted))


# ---- DeepSpeed (`runtime/lr_schedules.py`)


def deepspeed_warmup_decay(step: int, s: Curve) -> float:
    """`WarmupDecayLR`: log(n) / log(warmup) of the peak, then a straight line to 0; n counts the updates before."""
    before, warmup = step - 1, max(2, s.warmup)
    if before < warmup:
        return s.peak * math.log(max(before, 0) + 1) / math.log(warmup)
    return s.peak * max(0.0, (s.total - before) / max(1, s.total - warmup))


# ---- GPT-NeoX (`megatron/learning_rates.py`), as it is today and as it was in 2022


def neox_schedule(shape: Callable[[float], float]) -> Rate:
    """Return `shape` of the share of the steps after the warm-up that is done, scaled between peak and floor."""

    def rate(step: int, s: Curve) -> float:
        """GPT-NeoX's: peak x step / warmup, then the curve of this name between the peak and the floor."""
        if s.warmup and step <= s.warmup:
            # At most the peak: the source begins above it where the warm-up is shorter than a step.
            return s.peak * min(max(1, step) / s.warmup, 1)
        return max(shape_of((min(step, s.total) - s.warmup) / (s.total - s.warmup), s), s.floor)

    def shape_of(done: float, s: Curve) -> float:
        lowest = s.floor if shape is half_cosine else 0.0  # the others are cut off at the floor, not scaled to it
        return lowest + (s.peak - lowest) * shape(done)

    return rate


def neox2022_schedule(shape: Callable[[float], float]) -> Rate:
    """Return `shape` over the whole total although the warm-up is left out: it stops `warmup` steps before the end."""

    def rate(step: int, s: Curve) -> float:
        """GPT-NeoX's as it was in 2022: the same over the whole total, so that it stops `warmup` steps before it."""
        done = min(step, s.total - s.warmup)
        if s.warmup and step <= s.warmup:
            return s.peak * done / s.warmup
        return max(s.peak * shape(max(0.0, done - s.warmup) / s.total), s.floor)  # unclamped, above the peak

    return rate


def line(done: float) -> float:
    """Return a straight line from 1 to 0."""
    return 1 - done


def half_cosine(done: float) -> float:
    """Return half a cosine from 1 to 0."""
    return 0.5 * (math.cos(math.pi * done) + 1)


def flat(_: float) -> float:
    """Return 1."""
    return 1.0


def halving(done: float) -> float:
    """Return an exponential from 1 to about one half."""
    return math.exp(-0.693 * done)
