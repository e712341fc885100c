"""Loss scaling for fp16, whose smallest numbers are larger than many gradients: they are multiplied on their way.

The rule is DeepSpeed's, which GPT-NeoX configures. It lives on the device, as everything that a step decides does: no
step waits for the host to look whether a gradient has overflowed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretraining.config.training import TrainConfig

NAME = "optimizer.loss_scale"  # in a checkpoint


class LossScale:
    """What gradients of a mean loss are multiplied by."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.dynamic = config.loss_scale == 0
        self.window, self.hysteresis = config.loss_scale_window, config.loss_scale_hysteresis
        self.least = config.min_loss_scale
        first = 2.0**config.initial_scale_power if self.dynamic else config.loss_scale
        # The scale, steps since an overflow, and the overflows that leave the scale as it is.
        self.state = torch.tensor([first, 0.0, self.hysteresis - 1.0], device=device)

    @property
    def scale(self) -> Tensor:
        """The present one, a scalar."""
        return self.state[0]

    def excuses(self, loss: Tensor) -> Tensor:
        """Whether gradients that are not finite are the scale's fault, and a smaller one is still to be tried."""
        return torch.isfinite(loss) & (self.state[0] > self.least) & torch.tensor(self.dynamic, device=loss.device)

    def update(self, finite: Tensor) -> None:
        """After a step: halve it where gradients overflowed, once `hysteresis` have; double it after `window` steps
        without."""
        if not self.dynamic:
            return
        scale, clean, left = self.state.unbind()
        halved = torch.where(left > 0, scale, (scale / 2).clamp(min=self.least))
        overflowed = torch.stack((halved, torch.zeros_like(clean), (left - 1).clamp(min=0)))
        grows = (clean + 1) % self.window == 0
        full = torch.full_like(left, self.hysteresis - 1)
        passed = torch.stack((torch.where(grows, scale * 2, scale), clean + 1, torch.where(grows, full, left)))
        self.state.copy_(torch.where(finite, passed, overflowed))
