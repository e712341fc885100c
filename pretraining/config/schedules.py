"""The core's learning rate schedules: the formula of each, and the settings that it reads.

Pure arithmetic: the rate is a function of the step. Steps are 0-based optimizer updates; the returned value is the one
that update uses. Formulas: NeMo 1.14 `core/optim/lr_scheduler.py` unless a docstring names another source. After its
total a schedule keeps its last value unless its docstring says what follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple


class Curve(NamedTuple):
    """Parameters of a schedule. Steps are optimizer updates."""

    peak: float
    floor: float = 0.0
    warmup: float = 0.0  # steps; a fraction only where the schedule does not round a share of the total
    total: int = 1
    hold: int = 0  # steps at the peak after the warm-up
    constant: int = 0  # steps at the floor before the end
    more: Mapping[str, Any] = MappingProxyType({})  # settings that the schedule alone reads, and num_steps


Rate = Callable[[int, Curve], float]


class Schedule(NamedTuple):
    """A formula, and its settings besides learning_rate and num_steps."""

    rate: Rate
    reads: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()  # has no default for them
    rounds_warmup: bool = True


def after_warmup(rate: Rate) -> Rate:
    """Return `rate` after NeMo's warm-up, peak x (step + 1) / (warmup + 1) up to and with step `warmup`."""

    @wraps(rate)
    def with_warmup(step: int, s: Curve) -> float:
        if s.warmup and step <= s.warmup:
            return s.peak * (step + 1) / (s.warmup + 1)
        return rate(step, s)

    return with_warmup


def fms_cosine(step: int, s: Curve) -> float:
    """Quadratic warm-up over min(2000, total // 20) steps under a cosine from the peak at 0 to a tenth of it.

    fms-fsdp's (`main_training_llama.py`). Evaluated at step + 1, so that the first update already moves.
    """
    done = step + 1
    rising = 1 - (1 - min(done, s.warmup) / s.warmup) ** 2 if s.warmup else 1.0
    falling = 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, s.total) / s.total))
    return s.peak * min(rising, falling)


@after_warmup
def constant(step: int, s: Curve) -> float:
    """`WarmupPolicy`, and `WarmupHoldPolicy` whose hold has the same height: the peak; after the total, the floor."""
    return s.floor if step > s.total else s.peak


def cosine(step: int, s: Curve) -> float:
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


@after_warmup
def wsd(step: int, s: Curve) -> float:
    """Warm-up, `hold` steps at the peak, then a straight line to the floor at the total (Hu et al. 2024, MiniCPM)."""
    stable = s.warmup + s.hold
    return s.floor + (s.peak - s.floor) * min(1.0, max(s.total - step, 0) / (s.total - stable))


SPAN = ("lr_warmup_steps", "lr_warmup_ratio", "lr_decay_steps")
FLOOR = (*SPAN, "min_lr")

SCHEDULES = {
    "fms_cosine": Schedule(fms_cosine, ("lr_decay_steps",)),
    "constant": Schedule(constant, FLOOR),
    "cosine": Schedule(cosine, (*FLOOR, "lr_constant_steps")),
    "wsd": Schedule(wsd, (*FLOOR, "lr_hold_steps")),
}
