"""The setting of skipped updates. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pretraining.config.declaration import AtLeast, Resume
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class SkipStepConfig(TrainConfig):
    """A configuration with skipped updates."""

    # ---- Optimizer and schedule
    skip_step_deviations: Annotated[float, AtLeast(0), Resume.NOTE] = 0.0
    """Skip an update whose loss or gradient norm is more than this many standard deviations above the mean of the last
    128 steps; from the 65th step on. Decided on the device; the batch is not repeated. A resumed run goes on with
    the figures of the last steps, and counts what it skips from 0. 0: never. OLMo-core uses 6."""

    def recent_figures_on(self, device: Any) -> Any:
        """See TrainConfig."""
        if not self.skip_step_deviations:
            return super().recent_figures_on(device)
        from pretraining.extensions.skip_step.recent import RecentFigures

        return RecentFigures(self.skip_step_deviations, device)
