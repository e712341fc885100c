"""The starts of a run: when, where, by which command and versions. The page of curves shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretraining.config.extension import Extension

if TYPE_CHECKING:
    from pretraining.extensions.history.watch import History
    from pretraining.run.training_run import TrainingRun

FILE_NAME = "starts.jsonl"  # in the run's folder, beside metrics.jsonl


def watch(run: TrainingRun) -> History:
    """Return what notes this start."""
    from pretraining.extensions.history.watch import History

    return History(run)


EXTENSION = Extension(watch=watch)
