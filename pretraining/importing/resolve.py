"""A foreign configuration and the flags beside it become the values of our fields, with a record of every key.

Flags win over the file. What a table asks for that is no field of TrainConfig, or is no value that the field takes, is
unsupported: this recipe does not do it. So a row of a table works from the day its field exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pretraining.config.errors import ConfigError, Problem
from pretraining.config.flags import Values, field_types, read_values
from pretraining.config.training import TrainConfig
from pretraining.config.validate import comma_separated
from pretraining.importing.huggingface import model_config
from pretraining.importing.interpolation import MISSING
from pretraining.importing.rules import Rule, default_of, refused
from pretraining.importing.source import Opened, open_source
from pretraining.importing.support import find_rule, nearest, supported

# How the configuration came to be: no part of the configuration itself.
ORIGIN = (
    *("config_file", "import_config", "import_format", "import_report", "import_strict", "import_lr_steps"),
    *("model_config_path", "import_pp", "import_only", "source_world_size", "neox_era", "neox_gated_ffn"),
)

# A flag that makes another field of the file meaningless.
SAME_MATTER = (
    ("precision", "mixed_precision"),
    ("lr_warmup_steps", "lr_warmup_ratio"),
    ("global_batch_size", "gradient_accumulation_steps"),
)


@dataclass
class Record:
    """What became of one key of the source."""

    source_key: str
    source_value: Any  # as written
    resolved_value: Any  # references replaced
    status: str  # mapped, implied, ignored, unsupported
    values: dict[str, Any] = field(default_factory=dict)  # our fields
    note: str = ""

    @property
    def problem(self) -> Problem:
        """The record of an unsupported key as a mistake to mend."""
        return Problem(f"{self.source_key}={self.resolved_value}", self.note)


@dataclass
class Import:
    """A foreign configuration, resolved."""

    opened: Opened
    records: list[Record]  # one for each key of the source
    absent: list[Record]  # what its trainer takes for keys that are not there
    values: Values
    problems: list[Problem]  # of the source and of the configuration, all that stop the run
    warnings: list[Problem]  # unsupported keys that --import_strict=False lets pass


def import_source(flags: Mapping[str, object]) -> Import:
    """Resolve --import_config with the flags beside it. UserError if no configuration can be read at all."""
    origin = read_values({name: flags[name] for name in ORIGIN if name in flags}, missing_matters=False)
    if origin.problems:
        raise ConfigError(origin.problems)
    opened = open_source(comma_separated(str(flags["import_config"])), origin.config.import_format, flags)
    records = [_record(key, value, opened) for key, value in opened.source.leaves.items()]
    absent = [record for record in (_default(key, opened) for key in opened.table.absent) if record]
    merged = _merge(records + absent)
    _overridden(records + absent, flags)
    config = _configured(merged, flags, origin.config.import_only)
    unsupported = [record.problem for record in records + absent if record.status == "unsupported"]
    arithmetic = [problem for check in opened.table.checks for problem in check(opened.source)]
    stopping = unsupported if origin.config.import_strict else []
    own = [_traced(problem, records) for problem in config.problems]
    warnings = [] if stopping else unsupported
    return Import(opened, records, absent, config, [*stopping, *arithmetic, *own], warnings)


def _configured(merged: Mapping[str, Any], flags: Mapping[str, object], only: bool) -> Values:
    """The configuration of the file's values under the flags."""
    given = {name: value for name, value in flags.items() if name not in ORIGIN}
    idle = {other for pair in SAME_MATTER for other in pair if set(pair) & given.keys() and other not in given}
    below = model_config({"model_config_path": merged.get("model_config_path"), **flags})
    values = {"model_variant": "custom", "lr_schedule": "constant", **below, **merged, **given}
    kept = {name: value for name, value in values.items() if name not in idle and name not in ORIGIN}
    found = read_values(kept, missing_matters=not only)
    found.config.import_only = only
    problems = [problem for problem in found.problems if not (only and _needs_building(problem))]
    return Values(found.config, problems)


def _needs_building(problem: Problem) -> bool:
    """Pipelines are mapped before they can be trained with."""
    return problem.subject.startswith(("--pipeline_parallel_size", "--virtual_pipeline_size"))


def _traced(problem: Problem, records: list[Record]) -> Problem:
    """The problem with the key that the field's value came from."""
    name = problem.subject.removeprefix("--").partition("=")[0]
    keys = [f"{record.source_key}={record.resolved_value}" for record in records if name in record.values]
    way_out = ", or --import_pp=fold" if _needs_building(problem) else ""
    return Problem(problem.subject, f"{problem.remedy}{way_out} [from {', '.join(keys)}]") if keys else problem


# ---- one key


def _record(key: str, value: Any, opened: Opened) -> Record:
    raw = opened.raw.get(key)
    rule = find_rule(key, opened.table)
    if rule is None:
        return Record(key, raw, value, "unsupported", {}, f"no such key{nearest(key, opened.table)}")
    if value == MISSING:
        names = " or ".join(f"--{name}" for name in rule.fields) or "it"
        flagged = {name: opened.source.flags[name] for name in rule.fields if name in opened.source.flags}
        return Record(key, raw, value, "unsupported", flagged, f"??? has to be given: {names}")
    if value is None:
        return Record(key, raw, value, "mapped" if rule.fields else "ignored", {}, "null: not set")
    return _read(key, raw, value, rule, opened)


def _read(key: str, raw: Any, value: Any, rule: Rule, opened: Opened) -> Record:
    try:
        reading = rule.read(value, opened.source)
    except (TypeError, ValueError, ArithmeticError):  # a rule computed with what is no number
        reading = refused("this value is of another kind than the key takes")
    checked = supported(reading)
    return Record(key, raw, value, checked.status, checked.values, checked.note)


def _default(key: str, opened: Opened) -> Record | None:
    """What the source's trainer takes where the file says nothing."""
    if opened.source.leaves.get(key) is not None:
        return None
    value = default_of(opened.table.absent[key], opened.source)
    rule = find_rule(key, opened.table)
    if value is None or rule is None:
        return None
    record = _read(key, None, value, rule, opened)
    return None if record.status == "ignored" else record


# ---- all keys together


def _merge(records: list[Record]) -> dict[str, Any]:
    """The values of all records; a key that contradicts one before it becomes unsupported."""
    merged: dict[str, Any] = {}
    said: dict[str, Record] = {}
    for record in records:
        if record.status == "unsupported":
            continue
        clash = next((name for name, value in record.values.items() if merged.get(name, value) != value), None)
        if clash:
            other = said[clash]
            record.status = "unsupported"
            record.note = f"contradicts {other.source_key}={other.resolved_value}, which is {clash}={merged[clash]}"
            continue
        known = {name: value for name, value in record.values.items() if name in field_types()}
        merged.update(known)
        said.update(dict.fromkeys(known, record))
    return merged


def _overridden(records: list[Record], flags: Mapping[str, object]) -> None:
    """Flags win; a key that the command line answers is no longer unsupported."""
    for record in records:
        given = {name: flags[name] for name in record.values if name in flags and name not in ORIGIN}
        if not given:
            continue
        said = ", ".join(f"--{name}={value}" for name, value in given.items())
        if record.status == "unsupported" and given.keys() == record.values.keys():
            record.status = "implied"
            record.note = ""
        record.values |= given
        record.note = "; ".join(part for part in (record.note, f"overridden by command line: {said}") if part)


def import_flags(flags: Mapping[str, object]) -> TrainConfig:
    """The configuration of `flags`, --import_config among them. ConfigError with every mistake in both."""
    found = import_source(flags)
    if found.problems:
        raise ConfigError(found.problems)
    return found.values.config


def settings(config: TrainConfig) -> dict[str, Any]:
    """A configuration as data that --config_file reads back: without how it came to be."""
    return {name: value for name, value in asdict(config).items() if name not in ORIGIN}
