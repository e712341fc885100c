"""The loss scale, on the device. parallel/step.py works with it."""

from __future__ import annotations

import torch
from torch import Tensor

from pretraining.extensions.fp16.settings import Float16Config


class LossScale:
    """Factor of the gradients of a mean loss in fp16, whose smallest numbers are larger than many gradients.

    Lowered when gradients overflow, by DeepSpeed's rule, which GPT-NeoX configures.
    """

    def __init__(self, config: Float16Config, device: torch.device) -> None:
        self.is_dynamic = config.loss_scale == 0
        self.window, self.hysteresis = config.loss_scale_window, config.loss_scale_hysteresis
        self.minimum = config.min_loss_scale
        initial = 2.0**config.initial_scale_power if self.is_dynamic else config.loss_scale
        # Scale, steps since the last overflow, and how many more overflows leave the scale unchanged
        self._initial = (initial, 0.0, self.hysteresis - 1.0)
        self.state = torch.tensor(self._initial, device=device)

    def restart(self) -> None:
        """Begin with the first scale again, as where no step was made."""
        self.state.copy_(torch.tensor(self._initial))

    @property
    def scale(self) -> Tensor:
        """The current scale, a scalar."""
        return self.state[0]

    def figures(self) -> dict[str, Tensor]:
        """Return what a step reports, by name."""
        return {"loss_scale": self.scale}

    def can_back_off(self, loss: Tensor) -> Tensor:
        """Return whether gradients may be non-finite because of the scale, and the scale can still be lowered."""
        can_halve = torch.isfinite(loss) & (self.scale > self.minimum)
        return can_halve if self.is_dynamic else torch.zeros_like(can_halve)

    def update(self, is_finite: Tensor) -> None:
        """Halve the scale after the `hysteresis`-th overflow; double it after `window` steps without one."""
        if not self.is_dynamic:
            return
        scale, clean_steps, tolerated = self.state.unbind()
        halved = torch.where(tolerated > 0, scale, (scale / 2).clamp(min=self.minimum))
        after_overflow = torch.stack((halved, torch.zeros_like(clean_steps), (tolerated - 1).clamp(min=0)))
        grows = (clean_steps + 1) % self.window == 0
        reset = torch.full_like(tolerated, self.hysteresis - 1)
        grown, tolerated = torch.where(grows, scale * 2, scale), torch.where(grows, reset, tolerated)
        after_clean_step = torch.stack((grown, clean_steps + 1, tolerated))
        self.state.copy_(torch.where(is_finite, after_clean_step, after_overflow))
