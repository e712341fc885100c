"""From flags and files to the configuration of a run, validated by the checks of every room. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pretraining.config.errors import ConfigError, Problem, UserError
from pretraining.config.extension import Extension, FileFlags, configuration_of
from pretraining.config.flags import first_rank, is_script_setting, print_mistake, read_values, with_origin
from pretraining.config.grammar import without_credentials
from pretraining.config.script import USER_MISTAKE
from pretraining.config.training import TrainConfig
from pretraining.config.validate import Check
from pretraining.data.checks import CHECKS as DATA
from pretraining.data.checks import STORED_DATA
from pretraining.models.checks import CHECKS as MODELS
from pretraining.optim.checks import CHECKS as OPTIM
from pretraining.parallel.checks import CHECKS as PARALLEL
from pretraining.storage import use_files_of

CHECKS = (*MODELS, *PARALLEL, *OPTIM, *DATA)


def configure(
    settings: TrainConfig | Mapping[str, object],
    extensions: Sequence[Extension] = (),
    *,
    report: bool = True,
    own_data: bool = False,
) -> TrainConfig:
    """Return the configuration of flags, or of a configuration, and of the files that they name.

    report: this is the start of a run: check what it reads and writes too, and print the report of --import_config and
    the settings that are not the default. own_data: the caller has data, so that settings need not name stored ones.
    Raises ConfigError with every mistake.
    """
    if not isinstance(settings, TrainConfig | Mapping):
        raise UserError(f"settings={settings!r}: give a TrainConfig, or flags by name, such as {{'num_steps': 10}}")
    use_files_of(extensions)  # some checks look into folders
    flags = changed_settings(settings) if isinstance(settings, TrainConfig) else settings
    origin = "TrainConfig" if isinstance(settings, TrainConfig) else "command line"
    configuration = configuration_of(tuple(extensions))
    start_checks = start_checks_of(extensions, own_data) if report else []
    checks = [*checks_of(extensions, own_data), *start_checks]
    inputs = FileFlags(dict(flags), {}, [])
    for resolve in (extension.resolve for extension in extensions if extension.resolve):
        more = resolve(inputs.values, configuration, checks, report)
        inputs = FileFlags(more.values, {**inputs.origins, **more.origins}, [*inputs.problems, *more.problems])
    config, wrong = read_values(inputs.values, checks, configuration, missing_matters=not inputs.problems)
    if problems := [*inputs.problems, *(with_origin(problem, inputs.origins) for problem in wrong)]:
        raise ConfigError(problems)
    if report and config.trains and first_rank():
        print(config.printed("\n".join(describe_settings(config, flags, inputs.origins, origin))), flush=True)
    return config


def checks_of(extensions: Sequence[Extension], own_data: bool = False) -> tuple[Check, ...]:
    """Return the rules across settings of every room and extension; with `own_data` not those about stored data."""
    stored = (*STORED_DATA, *(check for extension in extensions for check in extension.stored_data_checks))
    return (*CHECKS, *(() if own_data else stored), *(check for extension in extensions for check in extension.checks))


def start_checks_of(extensions: Sequence[Extension], own_data: bool = False) -> list[Check]:
    """Return the rules about files and folders of a run that starts."""
    checks: list[Callable[[TrainConfig], None]] = []
    for extension in extensions:
        checks += extension.inputs if own_data else (*extension.inputs, *extension.stored_data)
    return [partial(check_input, check=check) for check in checks]


def check_input(config: TrainConfig, check: Callable[[TrainConfig], None]) -> Iterator[Problem]:
    """`check` raises no UserError. One that asks to try again ends the start."""
    try:
        if config.reads_data:
            check(config)
    except UserError as error:
        if error.code != USER_MISTAKE:
            raise
        yield from problems_of(error)


def problems_of(error: UserError) -> list[Problem]:
    """Return the mistakes that an error reports: those of a ConfigError, or one, whose text before ": " is the subject.

    The subject of a text of several lines may be a line of its own.
    """
    if isinstance(error, ConfigError):
        return error.problems
    subject, _, remedy = str(error).replace(":\n", ": ", 1).partition(": ")
    return [Problem(subject, remedy)]


def report_of(extensions: Sequence[Extension]) -> Callable[[UserError], None]:
    """Return what prints the mistake that ends a process."""
    return next((extension.report for extension in extensions if extension.report), print_mistake)


def compare_processes(config: TrainConfig, datasets: Mapping[str, Any], extensions: Sequence[Extension]) -> None:
    """Raise UserError if the processes of the run differ, where an extension finds that out."""
    for extension in extensions:
        if extension.agree:
            extension.agree(config, datasets)


def do_instead(config: TrainConfig, extensions: Sequence[Extension]) -> int | None:
    """Do what the configuration asks for instead of training, and return the exit code; None: it asks for training."""
    for extension in extensions:
        if extension.instead and (code := extension.instead(config)) is not None:
            return code
    return None


def changed_settings(config: TrainConfig) -> dict[str, object]:
    """Return the settings that are not the default: what a command line would name."""
    defaults = type(config)()
    return {name: value for name, value in vars(config).items() if value != getattr(defaults, name)}


def describe_settings(
    config: TrainConfig, flags: Mapping[str, object], origins: Mapping[str, str], origin: str
) -> list[str]:
    """Return a line for each setting that is not the default: its value, and where that comes from."""
    changed = changed_settings(config)
    sources = dict.fromkeys(changed, "derived") | dict(origins)
    for name, raw in flags.items():
        sources[name] = origins.get(name, "scripts/train.sh") if is_script_setting(name, raw) else origin
    words = {name: without_credentials(f"--{name}={value}") for name, value in changed.items()}
    width = min(max(map(len, words.values()), default=0), 80)  # PEFT may name the projections of all layers
    return [f"{word:<{width}}  {without_credentials(sources[name])}" for name, word in words.items()]
