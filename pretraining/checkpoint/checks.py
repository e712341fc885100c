"""Rules across the settings of checkpoints. Nothing is opened here."""

from __future__ import annotations

from collections.abc import Iterator

from pretraining.config.errors import Problem
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem


def check_scale(config: TrainConfig) -> Iterator[Problem]:
    """A logarithmic scale needs a base above 1."""
    if config.checkpoint_scale == "log" and config.checkpoint_interval == 1:
        yield problem(config, "checkpoint_interval", "has no powers for checkpoint_scale=log; use 2 or more")


def check_interval(config: TrainConfig) -> Iterator[Problem]:
    """A run that never saves does not save by the clock or at extra steps."""
    yield from without_effect(config, "checkpoint_seconds", "extra_checkpoint_steps")


def without_effect(config: TrainConfig, *names: str) -> Iterator[Problem]:
    """Yield the settings among `names` that are set although the run never saves."""
    for name in names:
        if getattr(config, name) and not config.checkpoint_interval:
            remedy = "has no effect with --checkpoint_interval=0, which never saves; give an interval in steps too"
            yield problem(config, name, remedy)


CHECKS = (check_scale, check_interval)
