"""Start the processes of a run on this host, and again after they died. scripts/train.sh ends as this program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretraining.config.extension import Extension, Watcher

if TYPE_CHECKING:
    from pretraining.run.training_run import TrainingRun


def watch(run: TrainingRun) -> Watcher:
    """Return what lets the launcher know the newest step, if there is a launcher."""
    from pretraining.tools.launch.progress import Progress

    return Progress(run.config.run_folder)


EXTENSION = Extension(watch=watch)
