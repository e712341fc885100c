"""Pretrain a Llama variant: `python main_training.py --name=value ...`, or `bash scripts/train.sh`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pretraining.config.extension import configuration_of, installed
from pretraining.config.flags import run
from pretraining.config.script import exit_with
from pretraining.run import configure as configuring
from pretraining.run import run as running

# Folders of pretraining/, in the order in which the loop calls them; one that is not there is left out.
NAMES = (
    "tools.importing",
    "tools.plan",
    "extensions.questions",
    "extensions.preemption",
    "extensions.trackers",
)
EXTENSIONS = installed(NAMES)
CHECKS = configuring.checks_of(EXTENSIONS)
CONFIGURATION: Any = configuration_of(EXTENSIONS)  # TrainConfig with the settings of the extensions
configure: Callable[..., Any] = partial(configuring.configure, extensions=EXTENSIONS)
train = partial(running.train, extensions=EXTENSIONS)


def main(**flags: str) -> int:
    """Pretrain a Llama variant: `train` has the parts of a run in their order."""
    return train(flags).code


if __name__ == "__main__":
    exit_with(lambda: run(main, checks=CHECKS, configuration=CONFIGURATION))
