"""The settings of the loss scale. Does not depend on torch or on devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pretraining.config.declaration import Above, AtLeast, Needs, settings_of
from pretraining.config.errors import Problem
from pretraining.config.support import XLA, Limit
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem

LIMIT = Limit(
    "precision",
    XLA,
    "TPUs and Trainium have bf16, which needs no loss scale (mixed_bf16)",
    values="fp16",
    is_set=lambda config: config.precision == "fp16",
)


@dataclass(frozen=True)
class Float16Config(TrainConfig):
    """A configuration whose precision may be fp16."""

    # ---- Precision
    loss_scale: Annotated[float, AtLeast(0), Needs("precision", "fp16")] = 0.0
    """Factor of the loss before the backward pass, so that small gradients do not underflow in fp16. 0: dynamic, halved
    when gradients overflow (that step is skipped) and doubled after loss_scale_window steps without overflow. The loss
    is the mean of a micro-batch: with another batch_size, other steps overflow."""
    initial_scale_power: Annotated[int, AtLeast(0, below=33), Needs("precision", "fp16")] = 16
    """Dynamic loss scale: the first scale is 2 to this power. Elsewhere: initial_loss_scale."""
    loss_scale_window: Annotated[int, AtLeast(1), Needs("precision", "fp16")] = 1000
    """Dynamic loss scale: steps without overflow after which the scale doubles."""
    loss_scale_hysteresis: Annotated[int, AtLeast(1), Needs("precision", "fp16")] = 2
    """Dynamic loss scale: overflows before the scale is halved; counted from 0 again when it doubles."""
    min_loss_scale: Annotated[float, Above(0), Needs("precision", "fp16")] = 1.0
    """Dynamic loss scale: the smallest scale; overflows at it count for max_skipped_steps."""

    @classmethod
    def limits(cls) -> tuple[Any, ...]:
        """See TrainConfig."""
        return (*super().limits(), LIMIT)

    def own_precision(self, mode: str) -> Any:
        """See TrainConfig."""
        if mode != "fp16":
            return super().own_precision(mode)
        from torch import float16

        from pretraining.optim.precision import Precision

        return Precision(activations=float16, compute=float16)

    def loss_scale_on(self, device: Any) -> Any:
        """See TrainConfig."""
        if self.precision != "fp16":
            return super().loss_scale_on(device)
        from pretraining.extensions.fp16.scale import LossScale

        return LossScale(self, device)


def check_loss_scale(config: Float16Config) -> Iterator[Problem]:
    """A fixed loss scale has no dynamics, and a dynamic one begins at its smallest or above."""
    if not config.loss_scale and config.min_loss_scale > 2**config.initial_scale_power:
        remedy = f"is above the first scale, 2 to the power of initial_scale_power={config.initial_scale_power}"
        yield problem(config, "min_loss_scale", f"{remedy}; lower it, or raise initial_scale_power")
    for name in ("initial_scale_power", "loss_scale_window", "loss_scale_hysteresis", "min_loss_scale"):
        if config.loss_scale and getattr(config, name) != settings_of(Float16Config)[name].default:
            remedy = f"is for the dynamic loss scale, and loss_scale={config.loss_scale} is fixed; remove one"
            yield problem(config, name, remedy)


CHECKS = (check_loss_scale,)
