"""A rule that the settings of further checkpoints share. Nothing is opened here."""

from __future__ import annotations

from collections.abc import Iterator

from pretraining.config.errors import Problem
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem


def without_effect(config: TrainConfig, name: str) -> Iterator[Problem]:
    """Yield a problem if the setting `name` is set although the run never saves."""
    if getattr(config, name) and not config.checkpoint_interval:
        remedy = "has no effect with --checkpoint_interval=0, which never saves; give an interval in steps too"
        yield problem(config, name, remedy)
