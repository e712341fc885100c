"""Validate a command line and print the folder of its run: `python -m pretraining.tools.run_folder --name=value ...`.

Opens no device and imports no torch. scripts/train.sh calls it before it launches anything, because torchrun turns
every exit code into 1.
"""

from __future__ import annotations

from main_training import CHECKS, CONFIGURATION, configure
from pretraining.config.flags import run
from pretraining.config.script import exit_with


def main(**flags: str) -> None:
    """Print the folder that a run with these flags writes to."""
    print(configure(flags, report=False).run_folder)


if __name__ == "__main__":
    exit_with(lambda: run(main, checks=CHECKS, configuration=CONFIGURATION))
