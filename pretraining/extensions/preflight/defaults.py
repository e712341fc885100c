"""The defaults of the settings, which people edit: a wrong one is named with its line, and an edited one is listed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from inspect import getsourcefile
from pathlib import Path

from pretraining.config.declaration import settings_of
from pretraining.config.errors import Problem
from pretraining.config.training import TrainConfig

PUBLISHED = Path(__file__).with_name("defaults.json")  # by name, as Python writes them


def check_defaults(config: TrainConfig) -> Iterator[Problem]:
    """A default, which users edit, is a value of its setting: otherwise its file and line are named."""
    for name, setting in settings_of(type(config)).items():
        if (fault := setting.fault(setting.default)) and vars(config)[name] == setting.default:
            yield Problem("{}:{}".format(*place_of_default(type(config), name)), f"the default of {name}: {fault}")


def place_of_default(configuration: type[TrainConfig], name: str) -> tuple[Path, int]:
    """Return the file and the line that declare a setting."""
    owner = next(kind for kind in configuration.__mro__ if name in vars(kind).get("__annotations__", ()))
    path = Path(getsourcefile(owner) or owner.__module__)
    lines = path.read_text().splitlines()
    return path, next(number for number, line in enumerate(lines, 1) if line.startswith(f"    {name}:"))


def published_defaults(configuration: type[TrainConfig]) -> str:
    """Return what PUBLISHED has for these settings."""
    defaults = {name: repr(setting.default) for name, setting in settings_of(configuration).items()}
    return json.dumps(defaults, indent=1) + "\n"


def edited_defaults(config: TrainConfig) -> list[str]:
    """Return a line for each setting whose value is an edited default: the value, and where it stands."""
    published = json.loads(PUBLISHED.read_text())
    edited: dict[str, str] = {}
    for name, setting in settings_of(type(config)).items():
        if (
            repr(setting.default) != published.get(name, repr(setting.default))
            and setting.default == vars(config)[name]
        ):
            path, line = place_of_default(type(config), name)
            edited[f"--{name}={setting.default}"] = f"{path.name}:{line}, edited from {published[name]}"
    width = max(map(len, edited), default=0)
    return [f"{words:<{width}}  {place}" for words, place in edited.items()]
