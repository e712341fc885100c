"""Rules across the settings of checkpoints. Nothing is opened here."""

from __future__ import annotations

from collections.abc import Iterator

from pretraining.config.errors import Problem
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem


def check_interval(config: TrainConfig) -> Iterator[Problem]:
    """A run that never saves does not save by the clock."""
    yield from without_effect(config, "checkpoint_seconds")


def without_effect(config: TrainConfig, *names: str) -> Iterator[Problem]:
    """Yield the settings among `names` that are set although the run never saves."""
    for name in names:
        if getattr(config, name) and not config.checkpoint_interval:
            remedy = "has no effect with --checkpoint_interval=0, which never saves; give an interval in steps too"
            yield problem(config, name, remedy)


CHECKS = (check_interval,)
