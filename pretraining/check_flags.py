"""Check a command line without training: `python -m pretraining.check_flags --name=value ...` prints the run's folder.

scripts/train.sh calls it before it launches anything, because torchrun turns every exit code into 1.
"""

from __future__ import annotations

import sys

from pretraining.config.flags import run
from pretraining.config.training import TrainConfig
from pretraining.importing.flags import flags_from_files


def print_run_folder(**flags: str) -> None:
    """Print the folder that a run with these flags writes to."""
    print(TrainConfig.from_flags(*flags_from_files(flags, report=False)).run_folder)


if __name__ == "__main__":
    sys.exit(run(print_run_folder))
