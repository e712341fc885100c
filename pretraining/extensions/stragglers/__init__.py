"""The slowest process of a run, at each report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pretraining.config.extension import Extension, Watcher
from pretraining.config.training import TrainConfig

if TYPE_CHECKING:
    from pretraining.run.training_run import TrainingRun


@dataclass(frozen=True)
class StragglersConfig(TrainConfig):
    """A configuration that may compare the processes of its run."""

    # ---- Logging and profiling
    log_stragglers: bool = False
    """Compare the processes at each report: data_wait_seconds_max and memory_bytes_max over all of them and, on the
    torch engine, the process that is slowest at the same matrix products (straggler) and its time over the median's
    (straggler_ratio), with a line above 1.2. Adds some 10 ms to a report. Elsewhere:
    create_straggler_detection_callback, log_straggler."""


def watch(run: TrainingRun) -> Watcher | None:
    """Return what compares, where it is asked for."""
    if not cast(StragglersConfig, run.config).log_stragglers:
        return None
    from pretraining.extensions.stragglers.watch import Stragglers

    return Stragglers(run)


EXTENSION = Extension(configuration=StragglersConfig, watch=watch)
