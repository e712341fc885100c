"""The line of the best checkpoint at the end of a run."""

from __future__ import annotations

import math
from typing import Any

from pretraining.checkpoint.folder import find_checkpoints, step_of
from pretraining.config.extension import Watcher
from pretraining.extensions.best_checkpoints.ranking import best_steps
from pretraining.run.training_run import TrainingRun


class BestCheckpoint(Watcher):
    """Prints where the best checkpoint is."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def where_to_look(self) -> list[str]:
        """See Watcher."""
        if not self._run.leads:
            return []
        config: Any = self._run.config
        try:
            folders = {step_of(path): path for path in find_checkpoints(self._run.checkpoints.folder).committed}
            values = config.validation_values()
        except OSError as error:
            return [f"  best         not known: {error}"]
        best = [step for step in best_steps(folders, values) if values[step] < math.inf][:1]
        return [f"  best         {folders[step]} ({config.keep_best_metric} {values[step]:.4f})" for step in best]
