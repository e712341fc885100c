"""From flags and files to the configuration of a run, validated by the checks of every room.

    python -m pretraining.configure --name=value ...

validates a command line without opening a device, and prints the folder of its run. scripts/train.sh calls it before it
launches anything, because torchrun turns every exit code into 1. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pretraining.checkpoint.checks import CHECKS as CHECKPOINT
from pretraining.config.flags import config_from_flags, first_rank, is_script_setting, run
from pretraining.config.grammar import without_credentials
from pretraining.config.script import exit_with
from pretraining.config.training import TrainConfig
from pretraining.config.validate import Check
from pretraining.data.checks import CHECKS as DATA
from pretraining.importing.flags import flags_from_files
from pretraining.models.checks import CHECKS as MODELS
from pretraining.monitor.checks import CHECKS as MONITOR
from pretraining.optim.checks import CHECKS as OPTIM
from pretraining.parallel.checks import CHECKS as PARALLEL
from pretraining.plan.checks import CHECKS as PLAN

CHECKS = (*MODELS, *PARALLEL, *OPTIM, *DATA, *CHECKPOINT, *MONITOR, *PLAN)


def configure(
    flags: Mapping[str, object],
    report: bool = True,
    checks: Iterable[Check] = CHECKS,
    origin: str = "command line",
) -> TrainConfig:
    """Return the configuration of `flags` and of the files that they name. Raises ConfigError with every mistake.

    report: print the report of --import_config, and the settings of a run that are not the default. checks: rules
    across settings. origin: of the flags.
    """
    values, origins, problems = flags_from_files(flags, report, checks)
    config = config_from_flags(values, checks, origins, problems)
    if report and config.reads_data and first_rank():
        print("\n".join(describe_settings(config, flags, origins, origin)), flush=True)
    return config


def describe_settings(
    config: TrainConfig, flags: Mapping[str, object], origins: Mapping[str, str], origin: str
) -> list[str]:
    """Return a line for each setting that is not the default: its value, and where that comes from."""
    defaults = TrainConfig()
    changed = {name: value for name, value in vars(config).items() if value != getattr(defaults, name)}
    sources = dict.fromkeys(changed, "derived") | dict(origins)
    for name, raw in flags.items():
        sources[name] = "scripts/train.sh" if is_script_setting(name, raw) else origin
    words = {name: without_credentials(f"--{name}={value}") for name, value in changed.items()}
    width = max(map(len, words.values()), default=0)
    return [f"{word:<{width}}  {without_credentials(sources[name])}" for name, word in words.items()]


def print_run_folder(**flags: str) -> None:
    """Print the folder that a run with these flags writes to."""
    print(configure(flags, report=False).run_folder)


if __name__ == "__main__":
    exit_with(lambda: run(print_run_folder, checks=CHECKS))
