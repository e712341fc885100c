"""The setting of the moving average of the weights, and its update. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pretraining.config.declaration import AtLeast, Resume
from pretraining.config.errors import Problem
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem

MOMENT = "ema"  # its name in the optimizer state, and in checkpoints


@dataclass(frozen=True)
class MovingAverageConfig(TrainConfig):
    """A configuration with a moving average of the weights."""

    # ---- Optimizer and schedule
    ema_decay: Annotated[float, AtLeast(0, below=1), Resume.STATE] = 0.0
    """Keep a moving average of the weights, ema = ema_decay x ema + (1 - ema_decay) x weight after every update, from
    the initial weights on. It is saved with the optimizer state and sharded like it; --use_ema of generate,
    evaluate and convert takes it in place of the weights. 0: none. Elsewhere: ema."""

    def followers(self) -> Mapping[str, Callable[[Any, Any], Any]]:
        """See TrainConfig."""
        if not self.ema_decay:
            return super().followers()
        return {**super().followers(), MOMENT: lambda average, weight: average.lerp(weight, 1 - self.ema_decay)}

    @property
    def matching_settings(self) -> list[str]:
        """See TrainConfig: this setting once stood after `optimizer_args`, and runs keep their names."""
        names = [name for name in super().matching_settings if name != "ema_decay"]
        place = max(names.index(name) for name in ("optimizer", "optimizer_args") if name in names) + 1
        return [*names[:place], "ema_decay", *names[place:]]


def check_moving_average(config: MovingAverageConfig) -> Iterator[Problem]:
    """It is saved, and in fp32 or rounded: a step changes it by less than half the spacing of bf16 numbers."""
    if config.ema_decay and not config.save_optimizer:
        yield problem(config, "ema_decay", "is saved with the optimizer state; give --save_optimizer=True")
    has_bf16_average = config.has_bf16_weights and not config.optimizers()[config.optimizer].has_fp32_state
    is_rounded = config.precision_mode == "bf16_sr" or getattr(config, "stochastic_rounding", False)  # of an extension
    if config.ema_decay and has_bf16_average and not is_rounded:
        yield problem(config, "ema_decay", "needs master_weights=True or stochastic_rounding=True")


CHECKS = (check_moving_average,)
