"""Saves during which training goes on: a thread writes a copy in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pretraining.config.declaration import Resume
from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class AsyncCheckpointingConfig(TrainConfig):
    """A configuration whose run may save in the background."""

    # ---- Checkpoints
    async_checkpointing: Annotated[bool, Resume.FREE] = False
    """Training waits only until its state is copied to host memory; the next save and the end of the run wait for the
    disk. Needs as much free host memory as this host's part of a checkpoint. Elsewhere: async_save, async_mode."""

    def background_saves(self, peers: Any) -> Any:
        """See TrainConfig."""
        from pretraining.extensions.async_checkpointing.saves import BackgroundSaves  # imports torch

        return BackgroundSaves(peers) if self.async_checkpointing else None


EXTENSION = Extension(configuration=AsyncCheckpointingConfig)
