"""What a run may add to the core. main_training.py hands a tuple of extensions to it; the core names none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import get_annotations
from typing import Any, NamedTuple

from pretraining.config.errors import Problem, UserError
from pretraining.config.training import TrainConfig
from pretraining.config.validate import Check


class FileFlags(NamedTuple):
    """Flags merged with the files that they name."""

    values: dict[str, Any]
    origins: dict[str, str]  # field -> "key=value in FILE", where a file gave the value
    problems: list[Problem]  # what a file asks for and this recipe cannot do


COMBINED = "pretraining.combined"  # __module__ of the configuration that main_training.py puts together


class Watcher:
    """One concern beside the training steps. The loop calls these methods in the order of its watchers."""

    def prepare(self) -> None:
        """Compile and run before the first step what will be needed later."""

    def before_step(self, step: int) -> None:
        """Act before the step that makes the update `step`. The step's time does not count this."""

    def after_step(self, step: int) -> None:
        """Act after the update `step`, and its report if it has one. The step's time does not count this."""

    def waits_after(self, step: int) -> bool:
        """Return whether `after_step` waits for the devices. The loop then does so first: it is the steps' time.

        The same in every process: what the loop reads then may end the run.
        """
        return False

    def figures(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return what the report of a step has besides `record`, the loop's figures. Called in every process."""
        return {}

    def record(self, record: Mapping[str, Any]) -> None:
        """Get a record that was written to metrics.jsonl. Called in process 0 alone."""

    def finish(self) -> None:
        """Act after the last step of a run that is complete."""

    def close(self) -> None:
        """Release what is held, at the end of the process's training, whatever ended it."""

    def where_to_look(self) -> list[str]:
        """Return lines that say where the run's output is."""
        return []


@dataclass(frozen=True, kw_only=True, eq=False)
class Extension:
    """One folder's additions to a run. A module has it as EXTENSION; every part may be absent."""

    configuration: type[TrainConfig] | None = None
    """A subclass of TrainConfig with the settings of this extension."""
    checks: tuple[Callable[[Any], Iterable[Problem]], ...] = ()
    """Rules across settings."""
    stored_data_checks: tuple[Callable[[Any], Iterable[Problem]], ...] = ()
    """Such rules about data that a caller may replace by data of its own."""
    resolve: Callable[[Mapping[str, object], type[TrainConfig], Iterable[Check], bool], FileFlags] | None = None
    """Merge flags with files that they name, before validation; the last argument: print a report."""
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Settings that do nothing while the first, a setting or a property of the configuration, is 0, False or empty."""
    stores: Mapping[str, Any] = field(default_factory=dict)
    """Beginning of paths, such as s3://, and the pretraining.storage.Store that reads and writes them."""
    checkpoint_formats: tuple[Any, ...] = ()
    """pretraining.storage.CheckpointFormat of other programs' checkpoints that a run can start from."""
    shard_formats: Mapping[str, Any] = field(default_factory=dict)
    """Value of file_type, and the pretraining.storage.ShardFormat of such token shards."""
    inputs: tuple[Callable[[Any], None], ...] = ()
    """Checks of what the run reads and writes, before torch is imported. Each raises UserError; all are reported."""
    stored_data: tuple[Callable[[Any], None], ...] = ()
    """Such checks of data that a caller may replace by data of its own."""
    agree: Callable[[Any, Mapping[str, Any]], None] | None = None
    """Compare the configuration, and the list of datasets (data.datasets.Dataset) of each split that is read from
    shards, with each other and with those of the run's other processes, before a device is opened. Raises UserError."""
    opened: Callable[[Any, Any, Mapping[str, Any], Sequence[Extension]], None] = lambda *_: None
    """Check or print what the configuration, the engine, the streams by split and all extensions decide, before the
    model is built. Raises UserError."""
    placed: Callable[[Any, Any, Any], None] = lambda *_: None
    """Print what is known of the configuration, the engine and the trainee, once the model is placed."""
    report: Callable[[UserError], None] | None = None
    """Print the mistake that ends this process, in place of config.flags.print_mistake."""
    watch: Callable[[Any], Watcher | None] | None = None
    """Return the Watcher of a TrainingRun, or None if the configuration asks for none. All processes have the same
    ones, because they wait for each other before a watcher prepares."""
    instead: Callable[[Any], int | None] | None = None
    """Do what the configuration asks for instead of training, and return the exit code; None: it asks for training."""


@cache
def configuration_of(extensions: tuple[Extension, ...]) -> type[TrainConfig]:
    """Return the dataclass of all settings, the core's and those of `extensions`: a subclass of each."""
    parts = tuple(extension.configuration for extension in extensions if extension.configuration)
    names = [name for part in parts for name in get_annotations(part)]
    assert len(names) == len(set(names)), f"declared twice: {sorted(name for name in names if names.count(name) > 1)}"
    combined = type("TrainConfig", (*reversed(parts), TrainConfig), {"__module__": COMBINED})
    return dataclass(frozen=True)(combined)


def installed(names: Sequence[str]) -> tuple[Extension, ...]:
    """Return the extensions of the modules `names` of this package whose folders are there."""
    present = (f"pretraining.{name}" for name in names if find_spec(f"pretraining.{name.partition('.')[0]}"))
    return tuple(import_module(name).EXTENSION for name in present if find_spec(name))
