"""The settings of TensorBoard and of trackers."""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pretraining.config.declaration import Resume
from pretraining.config.errors import Problem, UserError
from pretraining.config.flags import first_rank
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

    def output_folders(self) -> tuple[str, ...]:
        """See TrainConfig."""
        return (*super().output_folders(), "tensorboard_dir", "tracker_dir")


def check_tracker(config: TrackersConfig) -> Iterator[Problem]:
    """The tracker's package is installed."""
    if config.tracker and config.reads_data and find_spec(config.tracker) is None:
        yield problem(config, "tracker", f"needs a package: pip install {config.tracker}, or remove the flag")


def check_key(config: TrackersConfig) -> None:
    """Raise UserError if Weights & Biases has no key, and process 0 cannot ask for one."""
    asks = not first_rank() or sys.stdin.isatty() or "wandb" in sys.modules  # a notebook may have logged in
    if config.tracker == "wandb" and find_spec("wandb") and not asks and not has_key(os.environ):
        remedy = "`wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline to send the run later"
        raise UserError(f"--tracker=wandb: no API key: {remedy}")


def has_key(environment: Mapping[str, str]) -> bool:
    """Return whether Weights & Biases is given a key, or needs none."""
    if environment.get("WANDB_MODE", "online") != "online":
        return True
    if any(environment.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = next((path for path in map(Path.expanduser, netrc_files(environment)) if path.is_file()), None)
    try:
        return file is not None and netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return True  # wandb says what is wrong with it


def netrc_files(environment: Mapping[str, str]) -> list[Path]:
    """Return where wandb looks for its key."""
    return [Path(path) for path in (environment.get("NETRC", ""), "~/.netrc", "~/_netrc") if path]


CHECKS = (check_tracker,)
