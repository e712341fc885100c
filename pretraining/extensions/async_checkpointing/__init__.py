"""Saves during which training goes on: a thread writes a copy in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class AsyncCheckpointingConfig(TrainConfig):
    """A configuration whose run may save in the background."""

    def background_saves(self, peers: Any) -> Any:
        """See TrainConfig."""
        from pretraining.extensions.async_checkpointing.saves import BackgroundSaves  # imports torch

        return BackgroundSaves(peers) if self.async_checkpointing else None


EXTENSION = Extension(configuration=AsyncCheckpointingConfig)
