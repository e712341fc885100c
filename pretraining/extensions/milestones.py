"""Steps of a run at which extensions act: where its learning rate is shown, and where it validates."""

from __future__ import annotations

import math

from pretraining.config.training import TrainConfig
from pretraining.optim.schedule import warmup_steps


def milestone_steps(config: TrainConfig) -> list[int]:
    """Updates (0-based) that characterise the schedule: the first, the end of warm-up, the middle and the last."""
    total = min(config.lr_decay_steps or config.num_steps, config.num_steps)
    return sorted({0, min(math.ceil(warmup_steps(config)), config.num_steps - 1), total // 2, config.num_steps - 1})


def validates_at(config: TrainConfig, step: int) -> bool:
    """Return whether a run that validates does so after the update `step`."""
    return step > 0 and (step == config.num_steps or step % config.val_interval == 0)
