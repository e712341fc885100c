"""The command line, strictly: words to flags, flags to a TrainConfig, every mistake reported at once.

`run(main)` is the entry of a script whose `main(**flags)` begins with `TrainConfig.from_flags(flags)`. Knows nothing
of devices or files and imports nothing heavy, so a mistake costs a fraction of a second.

fire on its own would train on after a typo, read `--run_name=2026_08_01` as a number, `--flag=false` as a true string
and `--norm_eps` as "no rm_eps", and drop all after `#`. Here the words are brought into the one form `--name=value`
first, fire hands the raw text on, and the annotation of the field alone decides what the text means.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from pretraining.config.errors import ConfigError, Problem, UserError
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problems

HELP = frozenset({"--help", "-h"})
USER_MISTAKE = 2  # exit code


def run(main: Callable[..., int | None], arguments: Sequence[str] | None = None) -> int:
    """Call `main` with the flags of `arguments` (default: the process's), raw text each. Returns the exit code.

    0 or what `main` returns; 2 after a mistake of the user's, which is printed by rank 0 alone and without traceback.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if HELP & set(words):
        return _print_help()
    try:
        code = _call(main, read(words))
    except UserError as error:
        _tell(str(error))
        code = USER_MISTAKE
    _leave(code)
    return code


def _leave(code: int) -> None:
    """torchrun turns every exit code into 1; scripts/train.sh finds each process's own in the folder EXIT_CODES."""
    if folder := os.environ.get("EXIT_CODES"):
        Path(folder, os.environ.get("RANK", "0")).write_text(str(code))


def _print_help() -> int:
    from pretraining.config.document import help_text

    if first_rank():
        print(help_text())
    return 0


def _call(main: Callable[..., int | None], line: CommandLine) -> int:
    """Hand the flags to `main` through fire; a malformed line is refused together with all that its flags say."""
    if line.problems:
        raise ConfigError([*line.problems, *read_values(line.flags, missing_matters=False).problems])
    for note in line.notes:
        _tell(f"note: {note}")
    import fire

    command = [f"--{name}={value}" for name, value in line.flags.items()]
    code = fire.Fire(fire.decorators.SetParseFn(str)(main), command, serialize=lambda _: None)
    return code if isinstance(code, int) else 0


def _tell(text: str) -> None:
    if first_rank():
        print(text, file=sys.stderr, flush=True)


def first_rank() -> bool:
    """Under torchrun every process reads the same line; one of them speaks."""
    return os.environ.get("RANK", "0") == "0"


# ---- words to flags


class CommandLine(NamedTuple):
    """What the words say: raw text by field name, what cannot be a flag, and what deserves a remark."""

    flags: dict[str, str]
    problems: list[Problem]
    notes: list[str]


class _Flag(NamedTuple):
    word: str  # as typed
    name: str
    value: str | None  # None: nothing was given where something is needed


def read(words: Sequence[str]) -> CommandLine:
    """Sort `--name=value`, `--name value`, bare `--name` and `--noname` of boolean fields from everything else.

    Dashes in a name count as underscores. Of a flag given twice the last counts, and a note names both values.
    """
    line = CommandLine({}, [], [])
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if word.startswith("--") and word != "--":
            _add(line, _flag(word, rest))
        else:
            line.problems.append(_stray(word, rest))
    return line


def _add(line: CommandLine, flag: _Flag) -> None:
    if flag.name not in field_types():
        line.problems.append(_unknown(flag.name, flag.word))
    elif flag.value is None:
        line.problems.append(Problem(flag.word, f"needs a value: {_expected(flag.name)}"))
    else:
        earlier = line.flags.get(flag.name, flag.value)
        if earlier != flag.value:
            line.notes.append(f"--{flag.name}={earlier} is overridden by the later --{flag.name}={flag.value}")
        line.flags[flag.name] = flag.value


def _flag(word: str, rest: deque[str]) -> _Flag:
    """The flag that `word` begins; takes its value off `rest` where it stands apart."""
    head, equals, value = word.partition("=")
    name = head[2:].replace("-", "_")
    kind = field_types().get(name)
    if equals:
        return _Flag(word, name, value)
    if kind is None and field_types().get(name.removeprefix("no")) is bool:
        return _Flag(word, name.removeprefix("no"), "False")
    if rest and _is_value(rest[0]):
        value = rest.popleft()
        return _Flag(f"{word}={value}", name, value)
    return _Flag(word, name, "True" if kind is bool else None)


def _is_value(word: str) -> bool:
    """A word that may follow `--name`: not a flag, though a negative number also starts with a dash."""
    return not word.startswith("-") or word[1:2].isdigit() or word[1:2] == "."


def _stray(word: str, rest: deque[str]) -> Problem:
    """A word that belongs to no flag: a positional one, or a flag with a single dash and its value."""
    if not word.startswith("-") or not word.strip("-"):
        return Problem(word, "belongs to no flag; write --name=value")
    if "=" not in word and rest and _is_value(rest[0]):
        word = f"{word} {rest.popleft()}"
    return Problem(word, f"has a single dash; write --name=value{_nearest(word.strip('-').replace(' ', '='))}")


def _unknown(name: str, subject: str) -> Problem:
    return Problem(subject, f"no such flag{_nearest(name) or '; --help lists them all'}")


def _nearest(word: str) -> str:
    """ "; did you mean ...?" with the field names most like `word`, or nothing."""
    name = word.partition("=")[0].replace("-", "_").lower()
    close = get_close_matches(name, field_types(), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(f'--{field}' for field in close)}?" if close else ""


# ---- flags to a configuration


class Values(NamedTuple):
    """What flags came to."""

    config: TrainConfig  # defaults stand where a value could not be read
    problems: list[Problem]


FILES = ("config_file", "import_config", "model_config_path")  # read by pretraining/importing/flags.py


def config_from_flags(
    flags: Mapping[str, object], origins: Mapping[str, str] | None = None, problems: Sequence[Problem] = ()
) -> TrainConfig:
    """Return the configuration of `flags`: raw text or Python values by field name.

    Raises ConfigError with every mistake. Reads no files. origins: "key=value in FILE" for each field whose value a
    file gave; errors about the field name it. problems: mistakes in those files, reported with all others.
    """
    assert not any(flags.get(name) for name in FILES), "flags_from_files comes first"
    values = read_values(flags)
    if values.config.import_only or values.config.plan:
        values = read_values(flags, missing_matters=False)
    mistakes = [*problems, *(with_origin(problem, origins or {}) for problem in values.problems)]
    if mistakes:
        raise ConfigError(mistakes)
    return values.config


def with_origin(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """Return the problem with the key and file that the value of its field came from, if one did."""
    origin = origins.get(problem.subject.removeprefix("--").partition("=")[0])
    return Problem(problem.subject, f"{problem.remedy} [from {origin}]") if origin else problem


def read_values(flags: Mapping[str, object], missing_matters: bool = True) -> Values:
    """Read and validate what can be read.

    Rules about fields that could not be read are left out. So are, after mistakes, rules about flags that are
    missing: the unknown flag may be the missing one, misspelt. missing_matters False leaves those out at once.
    """
    values: dict[str, Any] = {}
    found: dict[str, Problem] = {}
    for name, raw in flags.items():
        if name not in field_types():
            found[name] = _unknown(name, f"--{name}={raw}")
            continue
        try:
            values[name] = coerce(raw, field_types()[name])
        except ValueError:
            found[name] = Problem(f"--{name}={raw}", _expected(name))
    missing_matters = missing_matters and found.keys() <= field_types().keys()
    config = TrainConfig(**values)
    return Values(config, [*found.values(), *problems(config, found.keys(), missing_matters)])


@cache
def field_types() -> dict[str, Any]:
    """Field name -> its annotation, resolved: str, int, float, bool, or one of them or None."""
    hints = get_type_hints(TrainConfig)
    return {field.name: hints[field.name] for field in fields(TrainConfig)}


def coerce(raw: object, kind: Any) -> object:
    """`raw` as `kind` says. Text fields take the text as it is. Raises ValueError if it says no such thing."""
    text = ",".join(map(str, raw)) if isinstance(raw, list | tuple) else str(raw)
    if kind is str:
        return text
    if NoneType in get_args(kind):
        (kind,) = set(get_args(kind)) - {NoneType}
        if text.lower() == "none":
            return None
    return _READERS[kind](text)


def _whole(text: str) -> int:
    """1000000, 1_000_000 or 1e6, which is a whole number too."""
    try:
        return int(text)
    except ValueError:
        if not (value := float(text)).is_integer():
            raise
        return int(value)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


def _truth(text: str) -> bool:
    if text.lower() not in _TRUTHS:
        raise ValueError
    return _TRUTHS[text.lower()]


_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_READERS: dict[Any, Callable[[str], object]] = {int: _whole, float: _finite, bool: _truth}
_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


def _expected(name: str) -> str:
    """ "expected a whole number, such as 4096": the field's type in words, with its default as the example."""
    kind, default = field_types()[name], getattr(TrainConfig, name)
    kinds = [_WORDS[part] for part in get_args(kind) or (kind,) if part is not NoneType]
    if NoneType in get_args(kind):
        kinds.append("none")
    example = f", such as {default}" if isinstance(default, int | float) and not isinstance(default, bool) else ""
    return f"expected {' or '.join(kinds)}{example}"
