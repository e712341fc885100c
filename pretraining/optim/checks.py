"""Rules across the settings of optimizer, schedule and precision."""

from __future__ import annotations

from collections.abc import Iterator

from pretraining.config.declaration import settings_of
from pretraining.config.errors import Problem
from pretraining.config.optimizers import FLAGS, is_like, parse_arguments
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
    """Warm-up and hold leave steps to decay in, and the floor is below the peak."""
    total = config.lr_decay_steps or config.num_steps
    if config.lr_warmup_steps is not None and config.lr_warmup_ratio is not None:
        remedy = f"has the same meaning as lr_warmup_steps={config.lr_warmup_steps}; set only one of the two"
        yield problem(config, "lr_warmup_ratio", remedy)
        return
    warmup = config.lr_warmup_steps or int((config.lr_warmup_ratio or 0) * total)
    lengths = {"lr_warmup_steps": warmup, "lr_hold_steps": config.lr_hold_steps}
    if total <= sum(lengths.values()):
        longest = max(lengths, key=lambda name: lengths[name])
        terms = " + ".join(f"{name}={steps}" for name, steps in lengths.items() if steps)
        span = "lr_decay_steps" if config.lr_decay_steps else "num_steps"
        yield Problem(f"--{longest}={lengths[longest]}", f"leaves no step to decay in: {terms} of {span}={total}")
    default = config.optimizers()[config.optimizer].learning_rate
    peak = default if config.learning_rate is None else config.learning_rate
    if config.min_lr > peak:
        yield problem(config, "min_lr", f"is above learning_rate={peak}")


def check_optimizer_settings(config: TrainConfig) -> Iterator[Problem]:
    """The optimizer has every setting that is set, and each is set once."""
    defaults = config.optimizers()[config.optimizer]
    accepted = f"it has {', '.join(defaults.arguments)}" if defaults.arguments else "it has none"
    for name, value in parse_arguments(config.optimizer_args).items():
        subject = f"--optimizer_args={name}={value}"
        if name not in defaults.arguments:
            yield Problem(subject, f"optimizer={config.optimizer} has no {name}; {accepted}")
        elif not is_like(value, defaults.arguments[name]):
            yield Problem(subject, f"expected a value like {defaults.arguments[name]}")
        elif name in FLAGS and getattr(config, FLAGS[name]) is not None:
            other = f"{FLAGS[name]}={getattr(config, FLAGS[name])}"
            yield Problem(subject, f"has the same meaning as {other}; set only one of the two")
    for name, field in FLAGS.items():
        if getattr(config, field) is not None and not isinstance(defaults.arguments.get(name, ()), float | None):
            yield problem(config, field, f"optimizer={config.optimizer} has no {name} of one number; {accepted}")
    if config.weight_decay and defaults.weight_decay is None:
        remedy = f"optimizer={config.optimizer} has no weight decay; remove it, or use another optimizer"
        yield problem(config, "weight_decay", remedy)


def check_precision(config: TrainConfig) -> Iterator[Problem]:
    """The two settings of precision agree."""
    mode = config.precision_mode
    if (mode != "fp32") != config.mixed_precision:
        remedy = f"contradicts mixed_precision={config.mixed_precision}; set --mixed_precision={mode != 'fp32'} too"
        yield problem(config, "precision", remedy)


CHECKS = (
    check_schedule_settings,
    check_schedule_lengths,
    check_optimizer_settings,
    check_precision,
)
