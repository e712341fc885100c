"""The settings of TensorBoard and of trackers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

from pretraining.config.declaration import Resume
from pretraining.config.errors import Problem
from pretraining.config.training import PER_HOST, TrainConfig
from pretraining.config.validate import problem


@dataclass(frozen=True)
class TrackersConfig(TrainConfig):
    """A configuration with trackers."""

    # ---- Logging and profiling
    tensorboard: Annotated[bool, Resume.FREE] = True
    """Write TensorBoard events, if the tensorboard package is installed."""
    tensorboard_dir: Annotated[str, Resume.FREE, PER_HOST] = ""
    """Folder of the TensorBoard events. Empty: <log_dir>/tensorboard."""
    tracker: Annotated[Literal["", "wandb", "aim"], Resume.FREE] = ""
    """"wandb": send every report to Weights & Biases too; "aim": to a repository of Aim. Either needs the package of
    that name. Empty: none."""
    tracker_dir: Annotated[str, Resume.FREE, PER_HOST] = ""
    """Folder of the tracker's own files, for Aim of its repository. Empty: log_dir."""
    tracker_project_name: Annotated[str, Resume.FREE] = "llama"
    """Project of the run in the tracker."""
    tracker_run_id: Annotated[str, Resume.FREE] = ""
    """The tracker's id of the run, to continue one that it has. Empty: the name of log_dir."""


def check_tracker(config: TrackersConfig) -> Iterator[Problem]:
    """The tracker's package is installed."""
    if config.tracker and config.reads_data and find_spec(config.tracker) is None:
        yield problem(config, "tracker", f"needs a package: pip install {config.tracker}, or remove the flag")


CHECKS = (check_tracker,)
