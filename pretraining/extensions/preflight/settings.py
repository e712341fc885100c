"""The setting of the checks alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pretraining.config.declaration import COMMON, Resume
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class PreflightConfig(TrainConfig):
    """A configuration that may be checked instead of run."""

    # ---- Logging and profiling
    check: Annotated[bool, Resume.FREE, COMMON] = False
    """Check settings, paths, tokenizer, data, packages, storage and the address of the first process, print every
    mistake, and stop: code 0 if there is none, otherwise 2. No device is opened."""

    @property
    def trains(self) -> bool:
        """See TrainConfig."""
        return super().trains and not self.check
