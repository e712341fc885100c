"""The learning rate as a pure function of the step.

Knows nothing of optimizers or devices. Steps are 0-based optimizer updates; the value returned is the one that update
uses. Formulas: NeMo 1.14 `core/optim/lr_scheduler.py` where a docstring names no other source. Every curve that has a
total stays where it ends after it (GPT-NeoX's cosine climbs back up there).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pretraining.config.optimizers import hyperparameters
from pretraining.config.training import TrainConfig


class Curve(NamedTuple):
    """What a schedule is made of. Steps are optimizer updates."""

    peak: float
    floor: float = 0.0
    warmup: float = 0.0  # steps; GPT-NeoX takes a share of the total as it is, unrounded
    total: int = 1
    hold: int = 0  # steps at the peak after the warm-up
    constant: int = 0  # steps at the floor before the end
    power: float = 1.0
    gamma: float = 1.0
    step_size: int = 1
    decay_rate: float = 0.5
    cycle: bool = False
    d_model: int = 1


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of the 0-based optimizer update `step`; past the end too."""
    arguments = hyperparameters(config).arguments
    if arguments.get("relative_step"):
        return relative_step(step, arguments)
    return SCHEDULES[config.lr_schedule](step, curve_of(config))


def relative_step(step: int, arguments: Mapping[str, Any]) -> float:
    """Adafactor's own rate, the same whatever the schedule says (Shazeer and Stern 2018, section 7)."""
    largest = 1e-6 * (step + 1) if arguments["warmup_init"] else arguments["min_step"]
    return min(largest, 1 / math.sqrt(step + 1))


def curve_of(config: TrainConfig) -> Curve:
    """The curve's parameters; what is not given takes the schedule's default."""
    total = config.lr_decay_steps or config.num_steps
    return Curve(
        peak=hyperparameters(config).learning_rate,
        floor=config.min_lr,
        warmup=warmup_steps(config),
        total=total,
        hold=config.lr_hold_steps,
        constant=config.lr_constant_steps,
        power=config.lr_power,
        gamma=1.0 if config.lr_gamma is None else config.lr_gamma,
        step_size=config.lr_step_size or 1,
        decay_rate=config.lr_decay_rate,
        cycle=config.lr_cycle,
        d_model=config.lr_d_model or 1,
    )


def warmup_steps(config: TrainConfig) -> float:
    """Steps of the warm-up: a whole number, but for GPT-NeoX's curves, which take their share unrounded."""
    total = config.lr_decay_steps or config.num_steps
    if config.lr_schedule == "fms_cosine":
        return min(2000, total // 20)
    if config.lr_warmup_ratio is None:
        return config.lr_warmup_steps or 0
    share = config.lr_warmup_ratio * total
    return share if config.lr_schedule.startswith("neox") else int(share)


def telling_steps(config: TrainConfig) -> list[int]:
    """Updates (0-based) whose rates show the curve: the first, the end of the warm-up, the middle, the last."""
    total = min(config.lr_decay_steps or config.num_steps, config.num_steps)
    return sorted({0, min(math.ceil(warmup_steps(config)), config.num_steps - 1), total // 2, config.num_steps - 1})


# ---- fms-fsdp (`main_training_llama.py`)


def fms_cosine(step: int, c: Curve) -> float:
    """Quadratic warm-up over min(2000, total // 20) steps under a cosine from the peak at 0 to a tenth of it.

    Evaluated at step + 1, so that the first update already moves. Under 20 steps there is no warm-up.
    """
    done = step + 1
    warmup = min(2000, c.total // 20)
    rising = 1 - (1 - min(done, warmup) / warmup) ** 2 if warmup else 1.0
    falling = 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, c.total) / c.total))
    return c.peak * min(rising, falling)


def fms_annealing(step: int, c: Curve) -> float:
    """A straight line from the peak at step 0 to 0 at the total; the last update, total - 1, still has peak / total."""
    return c.peak * max(1 - step / c.total, 0.0)


# ---- NeMo


def rising(step: int, c: Curve) -> float | None:
    """NeMo's warm-up, peak x (step + 1) / (warmup + 1) up to and with step `warmup`; None after it."""
    return c.peak * (step + 1) / (c.warmup + 1) if c.warmup and step <= c.warmup else None


def constant(step: int, c: Curve) -> float:
    """`WarmupPolicy`, and `WarmupHoldPolicy` whose hold has the same height: the peak; after the total, the floor."""
    early = rising(step, c)
    return early if early is not None else (c.floor if step > c.total else c.peak)


def linear_warmup_decay(step: int, c: Curve) -> float:
    """Hugging Face's linear schedule (NxDT's `LinearAnnealingWithWarmUp`): from 0 at step 0 to the peak, and to 0."""
    if step < c.warmup:
        return c.peak * step / max(1, c.warmup)
    return c.peak * max(0.0, (c.total - step) / max(1, c.total - c.warmup))


def cosine(step: int, c: Curve) -> float:
    """`CosineAnnealing`: half a cosine from the peak to the floor.

    With `constant` steps at the floor before the end, the warm-up is another one, peak x step / warmup.
    """
    end = c.total - c.constant
    if c.warmup and step <= c.warmup:
        return c.peak * step / c.warmup if c.constant else c.peak * (step + 1) / (c.warmup + 1)
    if step > end:
        return c.floor
    return c.floor + 0.5 * (c.peak - c.floor) * (1 + math.cos(math.pi * (step - c.warmup) / (end - c.warmup)))


def square(step: int, c: Curve) -> float:
    """`SquareAnnealing`: peak x (the share that is left)^2, at least the floor."""
    return _annealed(step, c, lambda left: c.peak * left**2)


def square_root(step: int, c: Curve) -> float:
    """`SquareRootAnnealing`: peak x sqrt((total - step) / total), which the warm-up does not shift."""
    early = rising(step, c)
    return early if early is not None else max(c.peak * math.sqrt(max(c.total - step, 0) / c.total), c.floor)


def warmup_annealing(step: int, c: Curve) -> float:
    """`WarmupAnnealing`: a straight line from the peak to the floor."""
    return _annealed(step, c, lambda left: c.floor + left * (c.peak - c.floor))


def _annealed(step: int, c: Curve, value: Callable[[float], float]) -> float:
    """`value` of the share of the steps after the warm-up that is left, 1 to 0; at least the floor."""
    early = rising(step, c)
    return early if early is not None else max(value(max(c.total - step, 0) / (c.total - c.warmup)), c.floor)


def noam(step: int, c: Curve) -> float:
    """`NoamAnnealing` (Vaswani et al. 2017): peak / sqrt(d_model) x min(1 / sqrt(step), step / warmup^1.5)."""
    s = max(1, step)
    slope = min(s**-0.5, s * c.warmup**-1.5) if c.warmup else s**-0.5
    rate = c.peak * c.d_model**-0.5 * slope
    return max(rate, c.floor) if step > c.warmup else rate


def noam_hold(step: int, c: Curve) -> float:
    """`NoamHoldAnnealing`: the peak for `hold` steps, then peak x warmup^r / (step - hold)^r, r the decay rate."""
    early = rising(step, c)
    if early is not None:
        return early
    if step < c.warmup + c.hold:
        return c.peak
    if step > c.total:
        return c.floor
    return max(c.peak * max(1, c.warmup**c.decay_rate) / max(1, (step - c.hold) ** c.decay_rate), c.floor)


def inverse_sqrt(step: int, c: Curve) -> float:
    """`InverseSquareRootAnnealing`: peak / sqrt((step + 1) / (warmup + 1))."""
    early = rising(step, c)
    if early is not None:
        return early
    return c.floor if step > c.total else c.peak / math.sqrt((step + 1) / (c.warmup + 1))


def poly(step: int, c: Curve) -> float:
    """`PolynomialDecayAnnealing`: (peak - floor) (1 - share done)^power + floor; with `cycle`, again and again."""
    early = rising(step, c)
    return early if early is not None else _poly(step - c.warmup, c.total - c.warmup, step, c)


def poly_hold(step: int, c: Curve) -> float:
    """`PolynomialHoldDecayAnnealing`: the same after `hold` steps at the peak."""
    early = rising(step, c)
    if early is not None:
        return early
    held = c.warmup + c.hold
    return c.peak if step < held else _poly(step - held, c.total - held, step, c)


def _poly(done: float, length: float, step: int, c: Curve) -> float:
    if step > c.total:
        return c.floor
    if c.cycle:
        length *= max(1, math.ceil(done / length))
    return (c.peak - c.floor) * (1 - min(done, length) / length) ** c.power + c.floor


def step_decay(step: int, c: Curve) -> float:
    """torch's StepLR, counted in steps: peak x gamma^(step // step_size)."""
    return c.peak * c.gamma ** (step // c.step_size)


def exponential_lr(step: int, c: Curve) -> float:
    """torch's ExponentialLR, counted in steps: peak x gamma^step."""
    return c.peak * c.gamma**step


# ---- Warm-up, stable, decay (Hu et al. 2024, MiniCPM)


def wsd(step: int, c: Curve) -> float:
    """Warm-up, `hold` steps at the peak, then a straight line to the floor at the total."""
    early = rising(step, c)
    if early is not None:
        return early
    stable = c.warmup + c.hold
    return c.floor + (c.peak - c.floor) * min(1.0, max(c.total - step, 0) / (c.total - stable))


# ---- GPT-NeoX (`megatron/learning_rates.py`), as it is today and as it was in 2022


def neox(shape: Callable[[float], float]) -> Callable[[int, Curve], float]:
    """`shape` of the share of the steps after the warm-up that is done, scaled between peak and floor."""

    def rate(step: int, c: Curve) -> float:
        if c.warmup and step <= c.warmup:
            return c.peak * max(1, step) / c.warmup
        return max(shape_of((min(step, c.total) - c.warmup) / (c.total - c.warmup), c), c.floor)

    def shape_of(done: float, c: Curve) -> float:
        lowest = c.floor if shape is _half_cosine else 0.0  # the others are cut off at the floor, not scaled to it
        return lowest + (c.peak - lowest) * shape(done)

    return rate


def neox2022(shape: Callable[[float], float]) -> Callable[[int, Curve], float]:
    """Over the whole total although the warm-up is left out, so that the curve stops `warmup` steps before the end."""

    def rate(step: int, c: Curve) -> float:
        done = min(step, c.total - c.warmup)
        if c.warmup and step <= c.warmup:
            return c.peak * done / c.warmup
        return max(c.peak * shape(max(0.0, done - c.warmup) / c.total), c.floor)  # unclamped, above the peak

    return rate


def _line(done: float) -> float:
    return 1 - done


def _half_cosine(done: float) -> float:
    return 0.5 * (math.cos(math.pi * done) + 1)


def _halving(done: float) -> float:
    return math.exp(-0.693 * done)  # to one half at the end


SCHEDULES: dict[str, Callable[[int, Curve], float]] = {
    "fms_cosine": fms_cosine,
    "fms_annealing": fms_annealing,
    "constant": constant,
    "linear_warmup_decay": linear_warmup_decay,
    "cosine": cosine,
    "wsd": wsd,
    "warmup_hold": constant,
    "square": square,
    "square_root": square_root,
    "noam": noam,
    "noam_hold": noam_hold,
    "warmup_annealing": warmup_annealing,
    "inverse_sqrt": inverse_sqrt,
    "poly": poly,
    "poly_hold": poly_hold,
    "step": step_decay,
    "exponential_lr": exponential_lr,
    "neox_linear": neox(_line),
    "neox_cosine": neox(_half_cosine),
    "neox_exponential": neox(_halving),
    "neox2022_linear": neox2022(_line),
    "neox2022_cosine": neox2022(_half_cosine),
    "neox2022_exponential": neox2022(_halving),
}
