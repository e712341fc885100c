"""Loss spikes, marked in the reports of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretraining.config.extension import Extension, Watcher

if TYPE_CHECKING:
    from pretraining.run.training_run import TrainingRun


def watch(run: TrainingRun) -> Watcher:
    """Return what marks the spikes."""
    from pretraining.extensions.spikes.watch import Spikes

    return Spikes(run)


EXTENSION = Extension(watch=watch)
