"""Resolve a foreign configuration and the flags next to it to values of our fields, with a report of every key.

Flags win over the file. What a table asks for that is no field of TrainConfig, or is no value that the field takes, is
unsupported, so a row of a table works from the day its field exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from inspect import get_annotations
from typing import Any

from pretraining.config.declaration import Above, AtLeast, settings_of
from pretraining.config.errors import ConfigError, Problem
from pretraining.config.flags import read_values, with_origin
from pretraining.config.grammar import comma_separated
from pretraining.config.training import TrainConfig
from pretraining.config.validate import Check
from pretraining.tools.importing.conversions import Conversion, unsupported_value
from pretraining.tools.importing.foreign import MISSING, ForeignConfig, is_integer
from pretraining.tools.importing.formats import open_foreign
from pretraining.tools.importing.mappings import KeyMapping, TrainerFormat
from pretraining.tools.importing.model_file import model_flags
from pretraining.tools.importing.settings import FileConfig

# How the configuration was made: no part of the configuration itself.
ORIGIN = tuple(get_annotations(FileConfig))

# A flag that makes another field of the file meaningless.
ALTERNATIVES = (
    ("precision", "mixed_precision"),
    ("lr_warmup_steps", "lr_warmup_ratio"),
    ("global_batch_size", "gradient_accumulation_steps"),
)

# What --data_path makes meaningless: it names other data than the file, and shards are recognised without file_type.
# A mixture stays, because its folder may be at another place on this machine.
DESCRIBES_DATA = {"file_type", "use_dummy_dataset"}

# Fields that a file may leave open with ???: without its data a run is refused anyway, or needs no tokenizer.
LEFT_OPEN = {"data_path", "datasets", "weights", "tokenizer_path"}

# Fields that TrainConfig does not have -> the values that describe this recipe. Any other value is unsupported.
FIXED: dict[str, tuple[Any, ...]] = {
    "transformer_block_type": ("pre_ln",),
    "pipeline_parallel_size": (1,),  # a field where its extension is installed, as the others
    "virtual_pipeline_size": (1,),
    "log_param_norm": (False,),
}


@dataclass
class KeyReport:
    """What one key of the foreign configuration becomes."""

    source_key: str
    source_value: Any  # as written
    resolved_value: Any  # references replaced
    status: str  # see Conversion
    values: dict[str, Any] = field(default_factory=dict)  # our fields
    note: str = ""

    def __str__(self) -> str:
        return f"{self.source_key}={self.resolved_value}"


@dataclass
class ImportResult:
    """A foreign configuration, resolved."""

    format: TrainerFormat
    foreign: ForeignConfig
    keys: list[KeyReport]  # one for each key of the source
    defaults: list[KeyReport]  # what its trainer takes for keys that are absent
    flags: dict[str, Any]  # by field name
    origins: dict[str, str]  # field -> "key=value in FILE"
    problems: list[Problem]  # of the source, all that stop the run
    warnings: list[Problem]  # unsupported keys that --import_strict=False accepts, and what the source would refuse
    config: TrainConfig  # of `flags`, with our defaults where a value cannot be read
    config_problems: list[Problem]


def import_foreign(
    flags: Mapping[str, object], checks: Iterable[Check] = (), configuration: type[TrainConfig] = FileConfig
) -> ImportResult:
    """Resolve --import_config with the flags next to it. Raises UserError if no configuration can be read at all."""
    asked, mistakes = read_values({name: flags[name] for name in ORIGIN if name in flags}, (), FileConfig, False)
    if mistakes:
        raise ConfigError(mistakes)
    assert isinstance(asked, FileConfig)
    overrides = asked.import_overrides.splitlines()
    format_, foreign = open_foreign(comma_separated(str(flags["import_config"])), asked.import_format, overrides, flags)
    foreign = replace(foreign, settings=settings_of(configuration), optimizers=configuration.optimizers())
    keys = [_report(key, format_, foreign) for key in foreign.values]
    defaults = [report for key in format_.defaults for report in _report_default(key, format_, foreign)]
    defaults += _report_missing(format_, foreign)
    merged, origins = _merge([*keys, *defaults], foreign)
    _override([*keys, *defaults], flags)
    below, below_origins, problems, notes = model_flags({**merged, **flags})
    replaced = [name for name in _replaced(below, merged) if name in below_origins and name not in flags]
    notes += [Problem(origins[name], f"replaces {below_origins[name]}") for name in replaced]
    given = {name: value for name, value in flags.items() if name not in ORIGIN}
    idle = {other for pair in ALTERNATIVES for other in pair if set(pair) & given.keys() and other not in given}
    idle |= DESCRIBES_DATA - given.keys() if given.get("data_path") else set()
    _leave_out([*keys, *defaults], idle)
    values = {"model_variant": "custom", "lr_schedule": "constant", **below, **merged, **given}
    values = {name: value for name, value in values.items() if name not in ORIGIN and name not in idle}
    origins = {name: text for name, text in {**below_origins, **origins}.items() if name not in {*given, *idle}}
    if asked.import_only:
        values["import_only"] = True
    refused = [Problem(str(report), report.note) for report in [*keys, *defaults] if report.status == "unsupported"]
    problems += [problem for check in format_.checks for problem in check(foreign)]
    warnings = [] if asked.import_strict else refused
    problems = problems if warnings else [*refused, *problems]
    warnings = [*warnings, *notes, *(problem for check in format_.advice for problem in check(foreign))]
    config, mistakes = read_values(values, checks, configuration, missing_matters=not asked.import_only)
    mistakes = [with_origin(problem, origins) for problem in mistakes]
    return ImportResult(format_, foreign, keys, defaults, values, origins, problems, warnings, config, mistakes)


# ---- one key


def _report(key: str, format_: TrainerFormat, foreign: ForeignConfig) -> KeyReport:
    written, value, mapping = foreign.written.get(key), foreign.values[key], format_.mapping_of(key)
    if key in foreign.other_stages:
        return KeyReport(key, written, value, "ignored", {}, "of another stage of NeMo's launcher")
    if mapping is None and value in (None, False, 0, {}) and not format_.is_misspelled(key):
        return KeyReport(key, written, value, "ignored", {}, "off; no key that this recipe knows")
    if mapping is None:
        return KeyReport(key, written, value, "unsupported", {}, format_.no_such_key(key))
    names = " or ".join(f"--{name}" for name in mapping.fields)
    if key in foreign.errors and convert(mapping, value, foreign).status == "ignored":
        return KeyReport(key, written, value, "ignored", {}, "not read, so its reference is not needed")
    if foreign.from_launcher and "not found" in foreign.errors.get(key, ""):
        return KeyReport(key, written, value, "ignored", {}, f"filled in by the launcher: give {names or 'a value'}")
    if value == MISSING and mapping.fields and set(mapping.fields) <= LEFT_OPEN:
        return KeyReport(key, written, value, "ignored", {}, f"left open: give {names}")
    if value == MISSING or key in foreign.errors:
        reason = foreign.errors.get(key, "??? is not a value")
        flagged = {name: foreign.flags[name] for name in mapping.fields if name in foreign.flags}
        return KeyReport(
            key, written, value, "unsupported", flagged, f"{reason}; give {names or 'a value in the file'}"
        )
    if value is None:
        return KeyReport(key, written, value, "mapped" if mapping.fields else "ignored", {}, "null: not set")
    return KeyReport(key, written, value, *convert(mapping, value, foreign))


def _report_default(key: str, format_: TrainerFormat, foreign: ForeignConfig) -> list[KeyReport]:
    """Return what the trainer takes where the file does not give `key`, if it decides anything here."""
    value, mapping = foreign.default(key), format_.mapping_of(key)
    if foreign.values.get(key) is not None or value is None or mapping is None:
        return []
    report = KeyReport(key, None, value, *convert(mapping, value, foreign))
    report.note = "; ".join(filter(None, (report.note, format_.sources.get(key))))
    return [] if report.status == "ignored" else [report]


def _report_missing(format_: TrainerFormat, foreign: ForeignConfig) -> list[KeyReport]:
    """Return a refusal for each key that the trainer itself cannot do without, and the file does not have."""
    remedy = f"is not in the file, and {format_.title} has no default: give"
    return [
        KeyReport(keys[0], None, None, "unsupported", {name: None}, f"{remedy} --{name}")
        for keys, name in format_.required.items()
        if all(foreign.values.get(key) is None for key in keys)
    ]


def convert(mapping: KeyMapping, value: Any, foreign: ForeignConfig) -> Conversion:
    """Return the conversion, or why this recipe cannot do what it asks for."""
    if isinstance(value, str) and value.lower() in ("true", "false"):  # which every trainer takes for True
        return unsupported_value("this is text: remove the quotes")
    try:
        conversion = mapping.convert(value, foreign)
    except (TypeError, ValueError, ArithmeticError):  # a converter computed with what is no number
        return unsupported_value("this value is of another kind than the key takes")
    for name, setting in conversion.values.items():
        if conversion.status != "unsupported" and (mistake := _mistake(name, setting, value, foreign)):
            return Conversion("unsupported", {name: setting}, mistake)
    return conversion


def _mistake(name: str, value: Any, source_value: Any, foreign: ForeignConfig) -> str:
    """Return what is wrong with a field's value, or nothing. Ranges of numbers are checked with all other settings."""
    setting = foreign.settings.get(name)
    if setting and setting.kind is int and value is source_value and isinstance(value, str | list):
        return f"{name}={value}: {setting.expected}, without quotes or brackets"
    if setting is None:
        return "" if value in FIXED.get(name, ()) else f"this recipe has no {name}={value} yet"
    try:
        converted = setting.read(value)
    except ValueError as error:
        return f"{name}={value}: {error}"
    fault = None if isinstance(setting.constraint, Above | AtLeast) else setting.fault(converted)
    return f"{name}={value}: {fault}" if fault else ""


# ---- all keys together


def _merge(reports: list[KeyReport], foreign: ForeignConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of all keys and their origins; a key that contradicts an earlier one becomes unsupported."""
    merged: dict[str, Any] = {}
    setters: dict[str, list[KeyReport]] = {}
    for report in reports:
        if report.status == "unsupported":
            continue
        clash = next((name for name, value in report.values.items() if name in merged and merged[name] != value), None)
        if clash:
            report.status = "unsupported"
            report.note = f"contradicts {setters[clash][0]}, which is {clash}={merged[clash]}"
            continue
        for name in report.values.keys() & foreign.settings.keys():
            merged[name] = report.values[name]
            setters.setdefault(name, []).append(report)
    return merged, {name: _origin(setting, foreign) for name, setting in setters.items()}


def _replaced(below: Mapping[str, Any], merged: Mapping[str, Any]) -> list[str]:
    """Return the fields whose value of config.json, in `below`, is another one in `merged`."""
    values = {**below, **merged}
    if values.get("head_dim", 0) is None:  # which then follows from these
        hidden, heads = (values.get(name) for name in ("hidden_size", "num_attention_heads"))
        values["head_dim"] = hidden // heads if is_integer(hidden) and is_integer(heads) and heads else None
    return [name for name in below if name in merged and below[name] != values[name]]


def _origin(reports: list[KeyReport], foreign: ForeignConfig) -> str:
    """Return "key=value in FILE" for the keys that set one field."""
    written = [report for report in reports if report.source_key in foreign.files]
    keys = ", ".join(map(str, written or reports))
    files = dict.fromkeys(str(foreign.files[report.source_key]) for report in written)
    return f"{keys} in {' and '.join(files)}" if written else f"{keys}, the trainer's default"


def _override(reports: list[KeyReport], flags: Mapping[str, object]) -> None:
    """Replace values by flags; a key whose fields are all given as flags is no longer unsupported."""
    for report in reports:
        given = {name: flags[name] for name in report.values if name in flags and name not in ORIGIN}
        if not given:
            continue
        words = ", ".join(f"--{name}={value}" for name, value in given.items())
        if report.status == "unsupported" and given.keys() == report.values.keys():
            report.status = "implied"
            report.note = ""
        report.values = {**report.values, **given}
        report.note = "; ".join(part for part in (report.note, f"overridden by command line: {words}") if part)


def _leave_out(reports: list[KeyReport], idle: Collection[str]) -> None:
    """Take the fields that the flags make meaningless out of the report."""
    for report in reports:
        if report.status != "unsupported" and report.values.keys() & idle:
            report.values = {name: value for name, value in report.values.items() if name not in idle}
            report.status = "implied"
            report.note = "; ".join(part for part in (report.note, "left out because of other flags") if part)


def settings(config: TrainConfig) -> dict[str, Any]:
    """Return a configuration as data that --config_file reads back: without how it was made."""
    return {name: value for name, value in asdict(config).items() if name not in ORIGIN}
