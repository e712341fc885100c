"""Rules across the settings of logging and profiling."""

from __future__ import annotations

from collections.abc import Iterator

from pretraining.config.errors import Problem
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem


def check_profile(config: TrainConfig) -> Iterator[Problem]:
    """The traced steps are steps of the run."""
    last = config.profile_start_step + config.profile_num_steps - 1
    if config.use_profiler and last > config.num_steps:
        remedy = f"traces steps up to {last}, but num_steps={config.num_steps}; start earlier or trace fewer steps"
        yield problem(config, "profile_start_step", remedy)


CHECKS = (check_profile,)
