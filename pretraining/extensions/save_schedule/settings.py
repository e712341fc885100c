"""The settings of further checkpoints. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pretraining.config.declaration import Resume
from pretraining.config.errors import Problem
from pretraining.config.grammar import parse_steps
from pretraining.config.settings import STEPS
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem
from pretraining.extensions.checks import without_effect
from pretraining.extensions.units import size


@dataclass(frozen=True)
class SaveScheduleConfig(TrainConfig):
    """A configuration with checkpoints at unequal distances."""

    # ---- Checkpoints
    checkpoint_scale: Annotated[Literal["linear", "log"], Resume.FREE] = "linear"
    """"linear": every checkpoint_interval steps. "log": at step 1 and at every power of checkpoint_interval, which is
    then at least 2."""
    extra_checkpoint_steps: Annotated[str, STEPS, Resume.FREE] = ""
    """Further steps that are saved, comma-separated; 0 is the state before the first step."""

    def saves_at(self, step: int) -> bool:
        """See TrainConfig."""
        if step in parse_steps(self.extra_checkpoint_steps):
            return True
        if self.checkpoint_scale == "log":
            return step == self.num_steps or is_power(step, self.checkpoint_interval)
        return super().saves_at(step)

    @property
    def facts(self) -> dict[str, str]:
        """See TrainConfig: the disk that checkpoints need, where nobody has said how many there are."""
        defaults = TrainConfig()
        names = [
            name for name in ("num_steps", "checkpoint_interval") if getattr(self, name) == getattr(defaults, name)
        ]
        if not (names and self.checkpoint_interval) or self.checkpoint_scale == "log":
            return super().facts
        from pretraining.extensions.state_bytes import unsharded_state_bytes  # torch takes 3 s

        count, state = math.ceil(self.num_steps / self.checkpoint_interval), unsharded_state_bytes(self)
        kept, each = min(count, self.keep_last_n_checkpoints or count), state["parameters"] + state["moments"]
        steps = f"every {self.checkpoint_interval:,} steps up to {self.num_steps:,} (default: {', '.join(names)})"
        disk = f"{kept} x {size(each)} = {size(kept * each)} of disk; --keep_last_n_checkpoints=N keeps fewer"
        return super().facts | {"checkpoints": f"{steps}, {disk}"}


def is_power(step: int, base: int) -> bool:
    """Return whether `step` is base**k for some k >= 0; base is at least 2."""
    while step > 1 and step % base == 0:
        step //= base
    return step == 1


def check_scale(config: SaveScheduleConfig) -> Iterator[Problem]:
    """A logarithmic scale needs saves, and a base above 1."""
    if config.checkpoint_scale == "log":
        yield from without_effect(config, "checkpoint_scale")
    if config.checkpoint_scale == "log" and config.checkpoint_interval == 1:
        yield problem(config, "checkpoint_interval", "has no powers for checkpoint_scale=log; use 2 or more")


def check_extra_steps(config: SaveScheduleConfig) -> Iterator[Problem]:
    """A run that never saves does not save at extra steps."""
    yield from without_effect(config, "extra_checkpoint_steps")


CHECKS = (check_scale, check_extra_steps)
