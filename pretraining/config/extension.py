"""What a run may add to the core. main_training.py hands a tuple of them to it; the core names none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from pretraining.config.errors import Problem
from pretraining.config.training import TrainConfig
from pretraining.config.validate import Check


class FileFlags(NamedTuple):
    """Flags merged with the files that they name: for config_from_flags."""

    values: dict[str, Any]
    origins: dict[str, str]  # field -> "key=value in FILE", where a file gave the value
    problems: list[Problem]  # what a file asks for and this recipe cannot do


@dataclass(frozen=True, kw_only=True)
class Extension:
    """One folder's additions to a run. A module has it as EXTENSION; every part may be absent."""

    checks: tuple[Check, ...] = ()
    """Rules across settings."""
    resolve: Callable[[Mapping[str, object], bool, Iterable[Check]], FileFlags] | None = None
    """Merge flags with files that they name, before validation; the second argument: print a report."""
    instead: Callable[[TrainConfig], int | None] | None = None
    """Do what the configuration asks for instead of training, and return the exit code; None: it asks for training."""


def installed(names: Sequence[str]) -> tuple[Extension, ...]:
    """Return the extensions of the modules `names` of this package whose folders are there."""
    present = (f"pretraining.{name}" for name in names if find_spec(f"pretraining.{name.partition('.')[0]}"))
    return tuple(import_module(name).EXTENSION for name in present if find_spec(name))
