"""From flags and files to the configuration of a run, validated by the checks of every room.

    python -m pretraining.configure --name=value ...

validates a command line without opening a device, and prints the folder of its run. scripts/train.sh calls it before it
launches anything, because torchrun turns every exit code into 1. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from pretraining.checkpoint.checks import CHECKS as CHECKPOINT
from pretraining.config.flags import config_from_flags, run
from pretraining.config.training import TrainConfig
from pretraining.data.checks import CHECKS as DATA
from pretraining.importing.flags import flags_from_files
from pretraining.models.checks import CHECKS as MODELS
from pretraining.monitor.checks import CHECKS as MONITOR
from pretraining.optim.checks import CHECKS as OPTIM
from pretraining.parallel.checks import CHECKS as PARALLEL
from pretraining.plan.checks import CHECKS as PLAN

CHECKS = (*MODELS, *PARALLEL, *OPTIM, *DATA, *CHECKPOINT, *MONITOR, *PLAN)


def configure(flags: Mapping[str, object], report: bool = True) -> TrainConfig:
    """Return the configuration of `flags` and of the files that they name. Raises ConfigError with every mistake.

    report: print the report of --import_config.
    """
    values, origins, problems = flags_from_files(flags, report, CHECKS)
    return config_from_flags(values, CHECKS, origins, problems)


def print_run_folder(**flags: str) -> None:
    """Print the folder that a run with these flags writes to."""
    print(configure(flags, report=False).run_folder)


if __name__ == "__main__":
    sys.exit(run(print_run_folder, checks=CHECKS))
