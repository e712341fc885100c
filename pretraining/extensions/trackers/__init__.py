"""TensorBoard where it is installed, and Weights & Biases or Aim on request: they get every record of metrics.jsonl."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretraining.config.extension import Extension
from pretraining.extensions.trackers.settings import CHECKS, TrackersConfig, check_key, check_server

if TYPE_CHECKING:
    from pretraining.extensions.trackers.sinks import Trackers
    from pretraining.run.training_run import TrainingRun


def watch(run: TrainingRun) -> Trackers:
    """Return what hands the records on; process 0 alone gets any, and opens the sinks."""
    from pretraining.extensions.trackers.sinks import Trackers

    return Trackers(run.config, run.config.run_folder, run.start_step, opens=run.leads)


EXTENSION = Extension(
    configuration=TrackersConfig,
    checks=CHECKS,
    inputs=(check_key, check_server),
    watch=watch,
    switches={
        "tensorboard": ("tensorboard_dir",),
        "tracker": ("tracker_dir", "tracker_project_name", "tracker_run_id"),
    },
)
