"""Learning rate as a pure function of the step.

Does not depend on optimizers or devices. Steps are 0-based optimizer updates; the returned value is the one that
update uses. Formulas: NeMo 1.14 `core/optim/lr_scheduler.py` unless a docstring names another source. After its total
every schedule keeps its last value (GPT-NeoX's cosine rises again), except the inverse square root of the hybrid one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pretraining.config.optimizers import hyperparameters
from pretraining.config.training import TrainConfig


class Schedule(NamedTuple):
    """Parameters of a schedule. Steps are optimizer updates."""

    peak: float
    floor: float = 0.0
    warmup: float = 0.0  # steps; GPT-NeoX does not round a share of the total
    total: int = 1
    last: int = 1  # steps of the run
    cooldown: int = 0  # steps to 0 at its end
    hold: int = 0  # steps at the peak after the warm-up
    constant: int = 0  # steps at the floor before the end
    power: float = 1.0
    gamma: float = 1.0
    step_size: int = 1
    decay_rate: float = 0.5
    cycle: bool = False
    d_model: int = 1


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of the 0-based optimizer update `step`, also past the end."""
    arguments = hyperparameters(config).arguments
    if arguments.get("relative_step"):
        return relative_step(step, arguments)
    schedule = schedule_of(config)
    if config.lr_schedule in AFTER_WARMUP and schedule.warmup and step <= schedule.warmup:
        return schedule.peak * (step + 1) / (schedule.warmup + 1)
    return SCHEDULES[config.lr_schedule](step, schedule)


def relative_step(step: int, arguments: Mapping[str, Any]) -> float:
    """Adafactor's relative step, which replaces the schedule (Shazeer and Stern 2018, section 7)."""
    largest = 1e-6 * (step + 1) if arguments["warmup_init"] else arguments["min_step"]
    return min(largest, 1 / math.sqrt(step + 1))


def schedule_of(config: TrainConfig) -> Schedule:
    """Return the parameters of the configured schedule."""
    total = config.lr_decay_steps or config.num_steps
    return Schedule(
        peak=hyperparameters(config).learning_rate,
        floor=config.min_lr,
        warmup=warmup_steps(config),
        total=total,
        last=config.num_steps,
        cooldown=config.lr_cooldown_steps,
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
    """Number of warm-up steps; a fraction only for GPT-NeoX's schedules, which do not round lr_warmup_ratio x total.

    Stable LM was trained with GPT-NeoX.
    """
    total = config.lr_decay_steps or config.num_steps
    if config.lr_schedule == "fms_cosine":
        return min(2000, total // 20)
    if config.lr_warmup_ratio is None:
        return config.lr_warmup_steps or 0
    share = config.lr_warmup_ratio * total
    return share if config.lr_schedule.startswith(("neox", "hybrid")) else int(share)


def milestone_steps(config: TrainConfig) -> list[int]:
    """Updates (0-based) that characterise the schedule: the first, the end of warm-up, the middle and the last."""
    total = min(config.lr_decay_steps or config.num_steps, config.num_steps)
    return sorted({0, min(math.ceil(warmup_steps(config)), config.num_steps - 1), total // 2, config.num_steps - 1})


# ---- fms-fsdp (`main_training_llama.py`)


def fms_cosine(step: int, s: Schedule) -> float:
    """Quadratic warm-up over min(2000, total // 20) steps under a cosine from the peak at 0 to a tenth of it.

    Evaluated at step + 1, so that the first update already moves. Under 20 steps there is no warm-up.
    """
    done = step + 1
    warmup = min(2000, s.total // 20)
    rising = 1 - (1 - min(done, warmup) / warmup) ** 2 if warmup else 1.0
    falling = 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, s.total) / s.total))
    return s.peak * min(rising, falling)


def fms_annealing(step: int, s: Schedule) -> float:
    """A straight line from the peak at step 0 to 0 at the total; the last update, total - 1, still has peak / total."""
    return s.peak * max(1 - step / s.total, 0.0)


# ---- NeMo; those of AFTER_WARMUP are called for steps after the warm-up alone


def constant(step: int, s: Schedule) -> float:
    """`WarmupPolicy`, and `WarmupHoldPolicy` whose hold has the same height: the peak; after the total, the floor."""
    return s.floor if step > s.total else s.peak


def linear_warmup_decay(step: int, s: Schedule) -> float:
    """Hugging Face's linear schedule (NxDT's `LinearAnnealingWithWarmUp`): from 0 at step 0 to the peak, and to 0."""
    if step < s.warmup:
        return s.peak * step / max(1, s.warmup)
    return s.peak * max(0.0, (s.total - step) / max(1, s.total - s.warmup))


def cosine(step: int, s: Schedule) -> float:
    """`CosineAnnealing`: half a cosine from the peak to the floor.

    With `constant` steps at the floor before the end, the warm-up is another one, peak x step / warmup. As many as
    there are steps after the warm-up leave no cosine: the floor follows the warm-up.
    """
    end = s.total - s.constant
    if s.warmup and step <= s.warmup:
        return s.peak * step / s.warmup if s.constant else s.peak * (step + 1) / (s.warmup + 1)
    if step >= end:
        return s.floor
    return s.floor + 0.5 * (s.peak - s.floor) * (1 + math.cos(math.pi * (step - s.warmup) / (end - s.warmup)))


def square(step: int, s: Schedule) -> float:
    """`SquareAnnealing`: peak x (the share that is left)^2, at least the floor."""
    return _annealed(step, s, lambda left: s.peak * left**2)


def square_root(step: int, s: Schedule) -> float:
    """`SquareRootAnnealing`: peak x sqrt((total - step) / total), which the warm-up does not shift."""
    return max(s.peak * math.sqrt(max(s.total - step, 0) / s.total), s.floor)


def warmup_annealing(step: int, s: Schedule) -> float:
    """`WarmupAnnealing`: a straight line from the peak to the floor."""
    return _annealed(step, s, lambda left: s.floor + left * (s.peak - s.floor))


def _annealed(step: int, s: Schedule, value: Callable[[float], float]) -> float:
    """`value` of the share of the steps after the warm-up that is left, 1 to 0; at least the floor."""
    return max(value(max(s.total - step, 0) / (s.total - s.warmup)), s.floor)


def noam(step: int, s: Schedule) -> float:
    """`NoamAnnealing` (Vaswani et al. 2017): peak / sqrt(d_model) x min(1 / sqrt(step), step / warmup^1.5)."""
    count = max(1, step)
    slope = min(count**-0.5, count * s.warmup**-1.5) if s.warmup else count**-0.5
    rate = s.peak * s.d_model**-0.5 * slope
    return max(rate, s.floor) if step > s.warmup else rate


def noam_hold(step: int, s: Schedule) -> float:
    """`NoamHoldAnnealing`: the peak for `hold` steps, then peak x warmup^r / (step - hold)^r, r the decay rate."""
    if step < s.warmup + s.hold:
        return s.peak
    if step > s.total:
        return s.floor
    return max(s.peak * max(1, s.warmup**s.decay_rate) / max(1, (step - s.hold) ** s.decay_rate), s.floor)


def inverse_sqrt(step: int, s: Schedule) -> float:
    """`InverseSquareRootAnnealing`: peak / sqrt((step + 1) / (warmup + 1))."""
    return s.floor if step > s.total else s.peak / math.sqrt((step + 1) / (s.warmup + 1))


def poly(step: int, s: Schedule) -> float:
    """`PolynomialDecayAnnealing`: (peak - floor) (1 - share done)^power + floor; with `cycle`, again and again."""
    return _poly(step - s.warmup, s.total - s.warmup, step, s)


def poly_hold(step: int, s: Schedule) -> float:
    """`PolynomialHoldDecayAnnealing`: the same after `hold` steps at the peak."""
    end = s.warmup + s.hold
    return s.peak if step < end else _poly(step - end, s.total - end, step, s)


def _poly(done: float, length: float, step: int, s: Schedule) -> float:
    if step > s.total:
        return s.floor
    if s.cycle:
        length *= max(1, math.ceil(done / length))
    return (s.peak - s.floor) * (1 - min(done, length) / length) ** s.power + s.floor


def step_decay(step: int, s: Schedule) -> float:
    """torch's StepLR, counted in steps: peak x gamma^(step // step_size)."""
    return s.peak * s.gamma ** (step // s.step_size)


def exponential_lr(step: int, s: Schedule) -> float:
    """torch's ExponentialLR, counted in steps: peak x gamma^step."""
    return s.peak * s.gamma**step


# ---- Warm-up, stable, decay (Hu et al. 2024, MiniCPM)


def wsd(step: int, s: Schedule) -> float:
    """Warm-up, `hold` steps at the peak, then a straight line to the floor at the total."""
    stable = s.warmup + s.hold
    return s.floor + (s.peak - s.floor) * min(1.0, max(s.total - step, 0) / (s.total - stable))


# ---- Stable LM 2 (Bellagente et al. 2024, section 2.4)


def hybrid_cosine_inv_sqrt(step: int, s: Schedule) -> float:
    """A cosine of period `total` to its quarter, then a / sqrt(step + b) with the same value and slope there.

    Before it a linear warm-up, which the cosine's argument includes; in the last `cooldown` steps of the run a straight
    line to 0 at its end.
    """
    begin = s.last - s.cooldown
    if s.cooldown and step > begin:
        return hybrid_cosine_inv_sqrt(begin, s) * max(s.last - step, 0) / s.cooldown
    if step < s.warmup:
        return s.peak * step / s.warmup
    half = (s.peak - s.floor) / 2
    if not half or step <= s.total / 4:
        return s.floor + half * (1 + math.cos(2 * math.pi * step / s.total))
    middle = s.floor + half  # the rate at the quarter
    shifted = middle * s.total / (4 * math.pi * half)  # quarter + b, by the slope -2 pi half / total
    return middle * math.sqrt(shifted / (step - s.total / 4 + shifted))


# ---- DeepSpeed (`runtime/lr_schedules.py`)


def deepspeed_warmup_decay(step: int, s: Schedule) -> float:
    """`WarmupDecayLR`: log(n) / log(warmup) of the peak, then a straight line to 0; n counts the updates before."""
    before, warmup = step - 1, max(2, s.warmup)
    if before < warmup:
        return s.peak * math.log(max(before, 0) + 1) / math.log(warmup)
    return s.peak * max(0.0, (s.total - before) / max(1, s.total - warmup))


# ---- GPT-NeoX (`megatron/learning_rates.py`), as it is today and as it was in 2022


def neox(shape: Callable[[float], float]) -> Callable[[int, Schedule], float]:
    """`shape` of the share of the steps after the warm-up that is done, scaled between peak and floor."""

    def rate(step: int, s: Schedule) -> float:
        if s.warmup and step <= s.warmup:
            # At most the peak: the source begins above it where the warm-up is shorter than a step.
            return s.peak * min(max(1, step) / s.warmup, 1)
        return max(shape_of((min(step, s.total) - s.warmup) / (s.total - s.warmup), s), s.floor)

    def shape_of(done: float, s: Schedule) -> float:
        lowest = s.floor if shape is _half_cosine else 0.0  # the others are cut off at the floor, not scaled to it
        return lowest + (s.peak - lowest) * shape(done)

    return rate


def neox2022(shape: Callable[[float], float]) -> Callable[[int, Schedule], float]:
    """Over the whole total although the warm-up is left out, so that the curve stops `warmup` steps before the end."""

    def rate(step: int, s: Schedule) -> float:
        done = min(step, s.total - s.warmup)
        if s.warmup and step <= s.warmup:
            return s.peak * done / s.warmup
        return max(s.peak * shape(max(0.0, done - s.warmup) / s.total), s.floor)  # unclamped, above the peak

    return rate


def _line(done: float) -> float:
    return 1 - done


def _half_cosine(done: float) -> float:
    return 0.5 * (math.cos(math.pi * done) + 1)


def _flat(_: float) -> float:
    return 1.0


def _halving(done: float) -> float:
    return math.exp(-0.693 * done)  # to one half at the end


# Schedules after NeMo's warm-up, peak x (step + 1) / (warmup + 1) up to and with step `warmup`
AFTER_WARMUP: dict[str, Callable[[int, Schedule], float]] = {
    "constant": constant,
    "wsd": wsd,
    "warmup_hold": constant,
    "square": square,
    "square_root": square_root,
    "noam_hold": noam_hold,
    "warmup_annealing": warmup_annealing,
    "inverse_sqrt": inverse_sqrt,
    "poly": poly,
    "poly_hold": poly_hold,
}
SCHEDULES: dict[str, Callable[[int, Schedule], float]] = {
    **AFTER_WARMUP,
    "fms_cosine": fms_cosine,
    "fms_annealing": fms_annealing,
    "linear_warmup_decay": linear_warmup_decay,
    "cosine": cosine,
    "noam": noam,
    "hybrid_cosine_inv_sqrt": hybrid_cosine_inv_sqrt,
    "deepspeed_warmup_decay": deepspeed_warmup_decay,
    "step": step_decay,
    "exponential_lr": exponential_lr,
    "neox_linear": neox(_line),
    "neox_cosine": neox(_half_cosine),
    "neox_exponential": neox(_halving),
    "neox_constant": neox(_flat),
    "neox2022_constant": neox2022(_flat),
    "neox2022_linear": neox2022(_line),
    "neox2022_cosine": neox2022(_half_cosine),
    "neox2022_exponential": neox2022(_halving),
}
