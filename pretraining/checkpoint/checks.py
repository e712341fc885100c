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


def check_load_path(config: TrainConfig) -> Iterator[Problem]:
    """Loading only the weights needs a place to load them from."""
    if config.reads_data and config.load_weights_only and not config.ckpt_load_path:
        remedy = "has no effect without --ckpt_load_path; set it, or remove this flag"
        yield problem(config, "load_weights_only", remedy, is_missing=True)


CHECKS = (check_scale, check_load_path)
