"""Which steps are outliers, on the device. parallel/step.py asks it at every step."""

from __future__ import annotations

import torch
from torch import Tensor

RECENT = 128  # steps that an outlier is compared with; at least half of them


class RecentFigures:
    """Loss and gradient norm of the last steps, and whether those of a step are far above them.

    OLMo-core's SkipStepOptimizer, on the device: figures of skipped steps count, too, so a lasting change is accepted.
    """

    def __init__(self, deviations: float, device: torch.device) -> None:
        self._deviations = deviations
        self.state = torch.full((2, RECENT), torch.nan, device=device)  # oldest first; nan: none yet, or not finite
        self.outliers = torch.zeros((), device=device)  # in this process

    def restart(self) -> None:
        """Forget the steps, as where none was made."""
        self.state.fill_(torch.nan)

    def figures(self) -> dict[str, Tensor]:
        """Return what a step reports, by name."""
        return {"outliers": self.outliers}

    def are_ordinary(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return whether neither is an outlier, and remember both."""
        figures = torch.stack((loss.detach(), norm))  # [2]
        is_known = torch.isfinite(self.state)
        count = is_known.sum(1)
        mean = torch.where(is_known, self.state, 0).sum(1) / count.clamp(min=1)
        squares = torch.where(is_known, self.state - mean[:, None], 0).square().sum(1)
        limit = mean + self._deviations * (squares / (count - 1).clamp(min=1)).sqrt()
        is_far = (figures > limit) & torch.isfinite(figures)  # one that is not finite is refused for that reason
        is_ordinary = ~(is_far & (count >= RECENT // 2)).any()
        self.state.copy_(torch.cat((self.state[:, 1:], figures[:, None]), 1))
        self.outliers += ~is_ordinary
        return is_ordinary
