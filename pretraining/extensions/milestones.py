"""The steps at which a learning rate is shown: at the start of a run, and in the report of an imported file."""

from __future__ import annotations

import math

from pretraining.config.training import TrainConfig
from pretraining.optim.schedule import warmup_steps


def milestone_steps(config: TrainConfig) -> list[int]:
    """Updates (0-based) that characterise the schedule: the first, the end of warm-up, the middle and the last."""
    total = min(config.lr_decay_steps or config.num_steps, config.num_steps)
    return sorted({0, min(math.ceil(warmup_steps(config)), config.num_steps - 1), total // 2, config.num_steps - 1})
