"""The settings of TensorBoard and of trackers."""

from __future__ import annotations

import netrc
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

from pretraining.config.declaration import PER_HOST, Grammar, Needs, Resume
from pretraining.config.errors import Problem, UserError
from pretraining.config.flags import first_rank
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem

NAME = Grammar(str, "a name")  # no path
PATIENCE = 2.5  # s for which Weights & Biases may take to answer


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
    that name. After kill -9, an offline run of Weights & Biases may lack the records of the last 15 s, which
    metrics.jsonl has. Empty: none. Elsewhere: report_to, use_wandb, wandb_log."""
    tracker_dir: Annotated[str, Resume.FREE, PER_HOST] = ""
    """Folder of the tracker's own files, for Aim of its repository. Empty: log_dir."""
    tracker_project_name: Annotated[str, NAME, Resume.FREE] = "llama"
    """Project of the run in the tracker. Elsewhere: wandb_project."""
    tracker_run_id: Annotated[str, NAME, Needs("tracker"), Resume.FREE] = ""
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
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    asks = not first_rank() or has_terminal or "wandb" in sys.modules  # a notebook may have logged in
    if config.tracker == "wandb" and find_spec("wandb") and not asks and not has_key(os.environ):
        remedy = "`wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline to send the run later"
        raise UserError(f"--tracker=wandb: no API key: {remedy}")


def check_server(config: TrackersConfig) -> None:
    """Raise UserError if process 0 does not reach Weights & Biases, which its package says after a minute and a half.

    Where the environment names a proxy, nothing is tried.
    """
    url = server(os.environ)
    if config.tracker != "wandb" or not find_spec("wandb") or not (first_rank() and is_online(os.environ)):
        return
    from urllib.request import getproxies  # takes 0.1 s

    try:
        if url.hostname and not (getproxies().keys() & {url.scheme, "all"}):
            port = url.port or {"http": 80}.get(url.scheme, 443)
            socket.create_connection((url.hostname, port), timeout=PATIENCE).close()
    except OSError as error:
        remedy = "check WANDB_BASE_URL and the network, or set WANDB_MODE=offline to send the run later"
        raise UserError(f"--tracker=wandb: {url.netloc} cannot be reached ({error}): {remedy}") from error


def is_online(environment: Mapping[str, str]) -> bool:
    """Return whether Weights & Biases is sent the records as they come."""
    return environment.get("WANDB_MODE", "online") == "online"


def server(environment: Mapping[str, str]) -> SplitResult:
    """Return where Weights & Biases is."""
    return urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai"))


def has_key(environment: Mapping[str, str]) -> bool:
    """Return whether Weights & Biases is given a key, or needs none."""
    if not is_online(environment):
        return True
    if any(environment.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = server(environment).hostname or ""
    file = next((path for path in map(Path.expanduser, netrc_files(environment)) if path.is_file()), None)
    try:
        return file is not None and netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return True  # wandb says what is wrong with it


def netrc_files(environment: Mapping[str, str]) -> list[Path]:
    """Return where wandb looks for its key."""
    return [Path(path) for path in (environment.get("NETRC", ""), "~/.netrc", "~/_netrc") if path]


CHECKS = (check_tracker,)
