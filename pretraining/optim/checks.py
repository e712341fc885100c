"""Rules across the settings of schedule and precision."""

from __future__ import annotations

from collections.abc import Iterator

from pretraining.config.declaration import settings_of
from pretraining.config.errors import Problem
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem


def check_schedule_settings(config: TrainConfig) -> Iterator[Problem]:
    """The schedule reads every schedule setting that is set, and has all that it requires."""
    settings, schedules = settings_of(type(config)), config.schedules()
    readers = {
        setting: [name for name, schedule in schedules.items() if setting in (*schedule.reads, *schedule.requires)]
        for setting in settings
    }
    for setting, names in readers.items():
        is_idle = names and config.lr_schedule not in names
        if is_idle and getattr(config, setting) != settings[setting].default:
            remedy = f"is not read by lr_schedule={config.lr_schedule}; remove it, or use {', '.join(names)}"
            yield problem(config, setting, remedy)
    chosen = schedules[config.lr_schedule]
    missing = [f"--{name}" for name in chosen.requires if getattr(config, name) is None]
    if missing:
        yield problem(config, "lr_schedule", f"needs {', '.join(missing)}")


def check_schedule_lengths(config: TrainConfig) -> Iterator[Problem]:
    """Warm-up, hold and constant part leave steps to decay in, and the floor is below the peak."""
    total = config.lr_decay_steps or config.num_steps
    if config.lr_warmup_steps is not None and config.lr_warmup_ratio is not None:
        remedy = f"has the same meaning as lr_warmup_steps={config.lr_warmup_steps}; set only one of the two"
        yield problem(config, "lr_warmup_ratio", remedy)
        return
    warmup = config.lr_warmup_steps or int((config.lr_warmup_ratio or 0) * total)
    lengths = {"lr_warmup_steps": warmup} | {n: getattr(config, n) for n in ("lr_hold_steps", "lr_constant_steps")}
    if total <= sum(lengths.values()):
        longest = max(lengths, key=lambda name: lengths[name])
        terms = " + ".join(f"{name}={steps}" for name, steps in lengths.items() if steps)
        span = "lr_decay_steps" if config.lr_decay_steps else "num_steps"
        yield Problem(f"--{longest}={lengths[longest]}", f"leaves no step to decay in: {terms} of {span}={total}")
    default = config.optimizers()[config.optimizer].learning_rate
    peak = default if config.learning_rate is None else config.learning_rate
    if config.min_lr > peak:
        yield problem(config, "min_lr", f"is above learning_rate={peak}")


def check_precision(config: TrainConfig) -> Iterator[Problem]:
    """The two settings of precision agree."""
    mode = config.precision_mode
    if (mode != "fp32") != config.mixed_precision:
        remedy = f"contradicts mixed_precision={config.mixed_precision}; set --mixed_precision={mode != 'fp32'} too"
        yield problem(config, "precision", remedy)


CHECKS = (check_schedule_settings, check_schedule_lengths, check_precision)
