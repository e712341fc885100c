"""The best checkpoints by a validation loss, kept besides the newest ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretraining.config.extension import Extension, Watcher
from pretraining.extensions.best_checkpoints.settings import CHECKS, BestCheckpointsConfig, check_dataset

if TYPE_CHECKING:
    from pretraining.run.training_run import TrainingRun


def watch(run: TrainingRun) -> Watcher | None:
    """Return what prints the best checkpoint at the end of a run, or None if no best ones are kept."""
    if not run.config.keep_best:  # type: ignore[attr-defined]
        return None
    from pretraining.extensions.best_checkpoints.watch import BestCheckpoint

    return BestCheckpoint(run)


EXTENSION = Extension(configuration=BestCheckpointsConfig, checks=CHECKS, stored_data=(check_dataset,), watch=watch)
