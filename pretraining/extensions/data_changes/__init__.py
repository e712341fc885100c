"""Runs that continue on other data: a new mixture begins at the step that was reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretraining.config.extension import Extension, Watcher
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class DataChangesConfig(TrainConfig):
    """A configuration whose data may be other ones than the checkpoint's."""

    # ---- Data
    accept_data_changes: bool = False
    """Continue although the data, its mixture or its order is not what the checkpoint was trained on: a new mixture
    begins at that step, and the change is printed and recorded. False: an error that lists what changed."""

    def begin_mixture(
        self, previous: Mapping[str, Any], order: dict[str, Any], mixture: Any, changes: list[str]
    ) -> dict[str, Any] | None:
        """See TrainConfig."""
        if not self.accept_data_changes:
            return super().begin_mixture(previous, order, mixture, changes)
        from pretraining.extensions.data_changes.mixture import begin_mixture  # imports numpy

        return begin_mixture(previous, order, mixture, changes)


class NewMixture(Watcher):
    """Prints what changed, in the start of a run whose first step is the first of a mixture."""

    def __init__(self, run: Any) -> None:
        """run: a TrainingRun."""
        self._run = run

    def prepare(self) -> None:
        """See Watcher."""
        state = self._run.stream.state(0)
        if state["earlier"] and (before := state["earlier"][-1])["until"] == state["sequences"]:
            begins = f"a new mixture begins with sequence {state['sequences']:,} of the run"
            self._run.print(f"note: {begins}: {'; '.join(before['changes'])}")


EXTENSION = Extension(
    configuration=DataChangesConfig, watch=lambda run: NewMixture(run) if run.config.accept_data_changes else None
)
