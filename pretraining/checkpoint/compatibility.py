"""Which settings may differ between a checkpoint and the run that takes it up, as their declarations say.

Needs no tensors, so a mistake is reported before one is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from pretraining.config.declaration import Resume, settings_of
from pretraining.config.errors import ConfigError, Problem
from pretraining.config.grammar import without_credentials
from pretraining.config.optimizers import FLAGS
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem
from pretraining.config.variants import model_shape
from pretraining.optim.schedule import learning_rate


class Change(NamedTuple):
    """A setting whose value in the checkpoint is not that of this run."""

    field: str
    before: Any
    now: Any
    policy: Resume = Resume.NOTE  # what is declared for such a change

    def __str__(self) -> str:
        before, now = ("an empty value" if value == "" else value for value in (self.before, self.now))
        return without_credentials(f"{self.field} {before} -> {now}")


def changes(saved: Mapping[str, Any], config: TrainConfig) -> list[Change]:
    """Return every change that is not free, with the model's dimensions and the optimizer's defaults resolved.

    Settings that only one of the two versions of this program has are left out.
    """
    before, now = _resolved(saved_config(saved, type(config))), _resolved(config)
    for one, other in ((before, now), (now, before)):
        if one["lr_decay_steps"] is None and other["lr_decay_steps"] is not None:
            one["lr_decay_steps"] = one["num_steps"]
    policies = {name: setting.resume for name, setting in settings_of(type(config)).items()}
    if config.position_embedding_type == "learned_absolute":
        policies["max_position_embeddings"] = Resume.SHAPE  # there is a vector for each
    compared = [name for name, policy in policies.items() if name in saved or policy in (Resume.SHAPE, Resume.FUNCTION)]
    differing = [name for name in compared if before[name] != now[name] and policies[name] is not Resume.FREE]
    return [Change(name, before[name], now[name], policies[name]) for name in differing]


def saved_config(saved: Mapping[str, Any], configuration: type[TrainConfig]) -> TrainConfig:
    """Return the configuration in a checkpoint's facts without the settings that this version does not have.

    Raises ConfigError if one that decides the model or the optimizer is out of its range.
    """
    settings = settings_of(configuration)
    config = configuration(**{name: value for name, value in saved.items() if name in settings})
    read = (Resume.SHAPE, Resume.FUNCTION, Resume.STATE)
    faults = {name: each.fault(getattr(config, name)) for name, each in settings.items() if each.resume in read}
    if wrong := [problem(config, name, f"in the checkpoint: {fault}") for name, fault in faults.items() if fault]:
        raise ConfigError(wrong)
    return config


def _resolved(config: TrainConfig) -> dict[str, Any]:
    chosen = config.hyperparameters
    optimizer = {"learning_rate": chosen.learning_rate, "weight_decay": chosen.weight_decay}
    optimizer |= {field: chosen.arguments[name] for name, field in FLAGS.items() if name in chosen.arguments}
    return {**asdict(config), **asdict(model_shape(config)), **optimizer, **config.resolved()}


def check_resume(saved: Mapping[str, Any], config: TrainConfig, other: str = "another --run_name") -> list[Change]:
    """Return the changes to print when a run continues. Raises ConfigError that lists those which are refused.

    other: what to give in order not to continue.
    """
    if saved.get("use_dummy_dataset", False) != config.use_dummy_dataset:
        remedy = f"the checkpoint was trained with {not config.use_dummy_dataset}; use that, or {other}"
        raise ConfigError([Problem(f"--use_dummy_dataset={config.use_dummy_dataset}", remedy)])
    differing = changes(saved, config)
    remedies = dict.fromkeys((Resume.SHAPE, Resume.FUNCTION, Resume.STATE), f"use that, or {other}")
    if not config.override_lr_on_resume:
        remedies[Resume.RATE] = "use that, or --override_lr_on_resume=True"
    refusable = [change for change in differing if not config.accepts(change.field, change.before)]
    refuse_changes(refusable, remedies, "the checkpoint was trained with")
    return differing


def describe_rate_change(saved: Mapping[str, Any], config: TrainConfig, step: int) -> str:
    """Return a sentence on the learning rate of the update after `step`, if the run has it, where it is another now."""
    earlier = saved_config(saved, type(config))
    before, now = learning_rate(earlier, step), learning_rate(config, step)
    if math.isclose(before, now) or step >= config.num_steps:
        return ""
    kept = learning_rate(replace(config, lr_decay_steps=earlier.num_steps), step)
    is_stretched = math.isclose(before, kept) and all(one.policy is not Resume.RATE for one in changes(saved, config))
    reason = f": the schedule spans num_steps; --lr_decay_steps={earlier.num_steps} keeps it as it was"
    return f"learning rate of step {step + 1:,}: {before:.3g} -> {now:.3g}{reason if is_stretched else ''}"


def refuse_changes(differing: list[Change], remedies: Mapping[Resume, str], origin: str) -> None:
    """Raise ConfigError if a change has a policy of `remedies`."""
    problems = []
    for change in differing:
        if change.policy in remedies:
            before = "an empty value" if change.before == "" else change.before
            problems.append(Problem(f"--{change.field}={change.now}", f"{origin} {before}; {remedies[change.policy]}"))
    if problems:
        raise ConfigError(problems)
