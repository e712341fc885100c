"""The settings of the clock. Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pretraining.config.declaration import AtLeast, Resume
from pretraining.config.errors import Problem, UserError
from pretraining.config.training import TrainConfig
from pretraining.extensions.checks import without_effect


@dataclass(frozen=True)
class ClockConfig(TrainConfig):
    """A configuration whose run may save and end by the clock, and whose steps may have a limit."""

    # ---- Batch and length
    max_run_seconds: Annotated[int, AtLeast(0, below=10**9), Resume.FREE] = 0
    """Seconds after the start of scripts/train.sh, or of the program without it, in which the run saves and ends, with
    exit code 4; the same command continues it. Training stops early enough for two more steps, for the validations and
    saves after them and for a last save, which last as long as the longest so far. 0: no limit."""

    # ---- Checkpoints
    checkpoint_seconds: Annotated[int, AtLeast(0, below=10**9), Resume.FREE] = 0
    """Seconds between checkpoints in ckpt_save_path, besides those of checkpoint_interval: the first step that ends
    later than this after the last save there is saved too. 0: never by the clock."""

    # ---- Logging and profiling
    step_timeout: Annotated[int, AtLeast(0, below=10**9)] = 0
    """Seconds after which a process whose step has not ended prints the stacks of its threads, to show where it hangs,
    and ends with exit code 5, so that scripts/train.sh starts the run again. The first step, and the first with
    rows or a global batch of another size, which may compile, have ten times as long; saves do not count. 0: never."""


def check_interval(config: ClockConfig) -> Iterator[Problem]:
    """A run that never saves does not save by the clock."""
    yield from without_effect(config, "checkpoint_seconds")


def check_launch_time(config: ClockConfig) -> None:
    """Raise UserError if LAUNCHED_AT is set to what the clock cannot use."""
    text = os.environ.get("LAUNCHED_AT") or "0"
    try:
        is_valid = math.isfinite(float(text))
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UserError(f"LAUNCHED_AT={text} in the environment: not a number of seconds: unset it")


CHECKS = (check_interval,)
