"""Losses on held-out data: validations between steps, and a test after the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pretraining.config.extension import Extension, Watcher
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class HeldOutConfig(TrainConfig):
    """A configuration whose run may evaluate held-out data."""

    def held_out_splits(self) -> list[str]:
        """See TrainConfig."""
        return ["valid"] * bool(self.val_interval) + ["test"] * bool(self.test_steps)


def watch(run: Any) -> Watcher | None:
    """Return what evaluates the splits of a TrainingRun besides "train"; None if there are none."""
    from pretraining.extensions.held_out.watch import Validation  # imports torch

    return Validation(run) if run.config.held_out_splits() else None


EXTENSION = Extension(configuration=HeldOutConfig, watch=watch)
