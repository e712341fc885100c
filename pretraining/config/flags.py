"""The command line: words to flags, flags to a TrainConfig, every mistake reported at once.

`run(main)` is the entry point of a script whose `main(**flags)` reads the flags with `read_values`. Does not depend on
devices or files and imports nothing heavy, so a mistake costs a fraction of a second.

fire on its own would train on after a typo, read `--run_name=2026_08_01` as a number, `--flag=false` as a true string
and `--norm_eps` as "no rm_eps", and drop everything after `#`. Here the words are first rewritten as `--name=value`,
fire hands the raw text on, and the annotation of the field alone decides what the text means.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pretraining.config.declaration import Setting, settings_of
from pretraining.config.errors import ConfigError, Problem, UserError
from pretraining.config.grammar import without_credentials
from pretraining.config.script import exit_code, write_exit_code
from pretraining.config.training import TrainConfig
from pretraining.config.validate import Check, problems


def print_mistake(error: UserError) -> None:
    """Print a mistake of the user without a traceback, in rank 0 or where the error asks for it."""
    if error.is_printed_by_all or first_rank():
        print(error, file=sys.stderr, flush=True)


def run(
    main: Callable[..., int | None],
    arguments: Sequence[str] | None = None,
    checks: Iterable[Check] = (),
    configuration: type[TrainConfig] = TrainConfig,
    report: Callable[[UserError], None] = print_mistake,
) -> int:
    """Call `main` with the flags of `arguments` (default: the process's) as raw text. Return the exit code.

    configuration: the dataclass whose fields are the flags; checks: rules across them. The code is 0 or what `main`
    returns, and 2 after a UserError, which `report` prints, and where the system refuses something.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if request := next((word for word in words if word in ("--help", "-h") or word.startswith("--help=")), None):
        if first_rank():
            print(configuration.help_page(request.partition("=")[2]))
        return 0
    try:
        code = exit_code(lambda: _call(main, read(words, configuration), checks, configuration))
    except UserError as error:
        report(error)
        code = error.code
    write_exit_code(code)
    return code


def _call(
    main: Callable[..., int | None], line: CommandLine, checks: Iterable[Check], configuration: type[TrainConfig]
) -> int:
    """Hand the flags to `main` through fire; refuse a malformed line together with every mistake in its flags."""
    if line.problems:
        _, problems = read_values(line.flags, checks, configuration, missing_matters=False)
        raise ConfigError([*line.problems, *problems])
    for note in line.notes:
        if first_rank():
            print(f"note: {without_credentials(note)}", file=sys.stderr, flush=True)
    import fire

    command = [f"--{name}={value}" for name, value in line.flags.items()]
    code = fire.Fire(fire.decorators.SetParseFn(str)(main), command, serialize=lambda _: None)
    return code if isinstance(code, int) else 0


def first_rank() -> bool:
    """Return whether this process prints: under torchrun every process reads the same command line."""
    return os.environ.get("RANK", "0") == "0"


def is_script_setting(name: str, raw: object) -> bool:
    """Return whether scripts/train.sh gave this flag; it names its settings in SCRIPT_SETTINGS."""
    return f"--{name}={raw}" in os.environ.get("SCRIPT_SETTINGS", "").split()


# ---- words to flags


class CommandLine(NamedTuple):
    """The words of a command line, sorted: raw text by field name, words that are wrong, and notes to print."""

    flags: dict[str, str]
    problems: list[Problem]
    notes: list[str]


def read(words: Sequence[str], configuration: type[TrainConfig] = TrainConfig) -> CommandLine:
    """Sort `--name=value`, `--name value`, bare `--name` and `--noname` of boolean fields from everything else.

    A dash in a name counts as an underscore. If a flag is repeated, the last one counts and a note names both values.
    """
    line, settings = CommandLine({}, [], []), settings_of(configuration)
    rest = deque(configuration.rewrite(words))
    while rest:
        word = rest.popleft()
        if word.startswith("--") and word != "--":
            _add(line, configuration, *_flag(word, rest, settings))
        else:
            line.problems.append(_stray(word, rest, configuration))
    return line


def _add(line: CommandLine, configuration: type[TrainConfig], word: str, name: str, value: str | None) -> None:
    settings = settings_of(configuration)
    if name not in settings:
        line.problems.append(_unknown(name, word, configuration))
    elif value is None:
        line.problems.append(Problem(word, f"needs a value: {settings[name].expected}"))
    else:
        earlier = line.flags.get(name, value)
        if earlier != value:
            line.notes.append(f"--{name}={earlier} is overridden by the later --{name}={value}")
        line.flags[name] = value


def _flag(word: str, rest: deque[str], settings: Mapping[str, Setting]) -> tuple[str, str, str | None]:
    """Return the flag as typed, its name and its value, which may be the next word of `rest`; None if there is none."""
    head, equals, value = word.partition("=")
    name = head[2:].replace("-", "_")
    if equals:
        return word, name, value
    positive = name.removeprefix("no").removeprefix("_")
    if name not in settings and positive in settings and settings[positive].kind is bool:
        return word, positive, "False"
    if rest and _is_value(rest[0]):
        value = rest.popleft()
        return f"{word}={value}", name, value
    return word, name, "True" if name in settings and settings[name].kind is bool else None


def _is_value(word: str) -> bool:
    """Return whether a word may follow `--name`: a flag may not, but a negative number starts with a dash too."""
    return not word.startswith("-") or word[1:2].isdigit() or word[1:2] == "."


def _stray(word: str, rest: deque[str], configuration: type[TrainConfig]) -> Problem:
    """Return the problem with a positional word, or with a flag that has a single dash, whose value it takes too."""
    if not word.startswith("-") or not word.strip("-"):
        return Problem(word, "belongs to no flag; write --name=value")
    if "=" not in word and rest and _is_value(rest[0]):
        word = f"{word} {rest.popleft()}"
    name = word.strip("-").replace(" ", "=").partition("=")[0]
    return Problem(word, f"has a single dash; write --name=value{_meant(name, configuration)}")


def _unknown(name: str, subject: str, configuration: type[TrainConfig]) -> Problem:
    return Problem(subject, f"no such flag{_meant(name, configuration) or '; --help lists them all'}")


def _meant(name: str, configuration: type[TrainConfig]) -> str:
    """Return "; did you mean ...?" with the settings that `name` may stand for, or nothing."""
    names = " or ".join(f"--{setting}" for setting in configuration.meant_by(name))
    return f"; did you mean {names}?" if names else ""


# ---- flags to a configuration


def with_origin(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """Return the problem with the key and file that the value of its field came from, if there is one."""
    origin = origins.get(problem.subject.removeprefix("--").partition("=")[0])
    return problem._replace(remedy=f"{problem.remedy} [from {origin}]") if origin else problem


def read_values(
    flags: Mapping[str, object], checks: Iterable[Check], configuration: type[TrainConfig], missing_matters: bool = True
) -> tuple[TrainConfig, list[Problem]]:
    """Read and validate what can be read; a field that cannot has its default. Return the problems too.

    flags: raw text or Python values by field name. checks: rules across settings.
    After an unknown flag, problems about settings that are not set are left out: the unknown flag may be the missing
    one, misspelt.
    """
    settings = settings_of(configuration)
    values: dict[str, Any] = {}
    wrong: dict[str, Problem] = {}
    for name, raw in flags.items():
        if name not in settings:
            wrong[name] = _unknown(name, f"--{name}={raw}", configuration)
            continue
        try:
            values[name] = settings[name].read(raw)
        except ValueError as error:
            wrong[name] = Problem(f"--{name}={raw}", str(error))
    missing_matters = missing_matters and wrong.keys() <= settings.keys()
    config = configuration(**values)
    return config, [*wrong.values(), *problems(config, checks, wrong.keys(), missing_matters)]
