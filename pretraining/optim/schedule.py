"""The learning rate of every update of a run, as a pure function of its configuration and of the step.

Does not depend on optimizers or devices. Steps are 0-based optimizer updates. Formulas: config/schedules.py.
"""

from __future__ import annotations

from pretraining.config.schedules import Curve
from pretraining.config.training import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of the 0-based optimizer update `step`, also past the end."""
    if (rate := config.own_rate(step)) is not None:
        return rate
    schedule = config.schedules()[config.lr_schedule]
    curve = Curve(
        peak=config.hyperparameters.learning_rate,
        floor=config.min_lr,
        warmup=warmup_steps(config),
        total=config.lr_decay_steps or config.num_steps,
        hold=config.lr_hold_steps,
        constant=config.lr_constant_steps,
        more={name: getattr(config, name) for name in (*schedule.reads, *schedule.requires, "num_steps")},
    )
    return schedule.rate(step, curve)


def warmup_steps(config: TrainConfig) -> float:
    """Return the number of warm-up steps; a fraction only for schedules that do not round lr_warmup_ratio x total."""
    total = config.lr_decay_steps or config.num_steps
    if config.lr_schedule == "fms_cosine":
        return min(2000, total // 20)  # fms-fsdp's rule: under 20 steps there is none
    if config.lr_warmup_ratio is None:
        return config.lr_warmup_steps or 0
    share = config.lr_warmup_ratio * total
    return int(share) if config.schedules()[config.lr_schedule].rounds_warmup else share
