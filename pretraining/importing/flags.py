"""Turn configuration files into flags: the one function of this room that main_training.py calls.

--config_file holds settings with our own names, --import_config is a file of NxD Training, NeMo Megatron or GPT-NeoX,
and --model_config_path is Hugging Face's config.json. Each is read once. A flag of the command line wins over
--config_file, which wins over --import_config, which wins over --model_config_path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.config.errors import Problem
from pretraining.config.flags import first_rank, is_script_setting, read_values
from pretraining.config.grammar import without_credentials
from pretraining.config.training import SETTINGS
from pretraining.config.validate import Check
from pretraining.importing.huggingface import ModelFlags, find_config_json, model_flags
from pretraining.importing.reading import read_file
from pretraining.importing.report import as_data, as_text, describe_differences, write_report
from pretraining.importing.resolve import import_foreign


class FileFlags(NamedTuple):
    """Flags merged with the files that they name: for config_from_flags."""

    values: dict[str, Any]
    origins: dict[str, str]  # field -> "key=value in FILE", where a file gave the value
    problems: list[Problem]  # what a file asks for and this recipe cannot do


def flags_from_files(flags: Mapping[str, object], report: bool = True, checks: Iterable[Check] = ()) -> FileFlags:
    """Return `flags` merged with the files that they name. Raises UserError if one of them cannot be read.

    report: on the first process, print what became of each key of --import_config and write it to --import_report;
    with --import_only and no file to import, print the settings alone. checks: rules across settings, whose problems
    are in the report too.
    """
    own = _read_config_file(flags)
    given = {**own.values, **flags}
    given.pop("config_file", None)
    origins = {name: origin for name, origin in own.origins.items() if name not in flags}
    report = report and first_rank()
    if given.get("import_config"):
        result = import_foreign(given, checks)
        if report:
            data = as_data(result, str(given.get("import_lr_steps", "")))
            print(without_credentials(as_text(result, data)))
            write_report(data, str(given.get("import_report", "")))
        return FileFlags(result.flags, {**result.origins, **origins}, [*own.problems, *result.problems])
    if find_config_json(given) and is_script_setting("model_variant", given.get("model_variant")):
        del given["model_variant"]  # only a variant that the user names replaces that of the file
    model = model_flags(given)
    given.pop("model_config_path", None)
    origins |= {name: origin for name, origin in model.origins.items() if name not in given}
    values, problems = {**model.values, **given}, [*own.problems, *model.problems]
    config, mistakes = read_values(values, checks, missing_matters=False)
    if report and not problems and not mistakes:
        for note in [*_replaced(own, flags), *_replaced(model, given), *model.notes]:
            print(without_credentials(f"note: {note.subject}: {note.remedy}"))
    if report and config.import_only and not problems and not mistakes:
        print(without_credentials("\n".join(describe_differences(config))))
    return FileFlags(values, origins, problems)


def _read_config_file(flags: Mapping[str, object]) -> FileFlags:
    """Return the settings in --config_file. Those in a section are read as if they stood above it."""
    path = str(flags.get("config_file") or "")
    if not path:
        return FileFlags({}, {}, [])
    tree = read_file(Path(path))
    sections = {name: value for name, value in tree.items() if isinstance(value, dict)}
    values = {name: value for name, value in tree.items() if name not in ("config_file", *sections)}
    for section in sections.values():
        values |= section
    remedy = "is a section, and settings have none: remove this line, and keep"
    problems = [
        Problem(f"[{name}] in {path}", f"{remedy} {', '.join(map(str, section)) or 'nothing'}")
        for name, section in sections.items()
    ]
    return FileFlags(values, {name: f"{name}={value} in {path}" for name, value in values.items()}, problems)


def _replaced(file: FileFlags | ModelFlags, flags: Mapping[str, object]) -> list[Problem]:
    """Return a note for each flag that has another value than the file below it."""
    return [
        Problem(f"--{name}={flags[name]}", f"replaces {origin}")
        for name, origin in file.origins.items()
        if name in flags and _read_value(name, flags[name]) != _read_value(name, file.values[name])
    ]


def _read_value(name: str, raw: object) -> object:
    with suppress(ValueError):
        return SETTINGS[name].read(raw)
    return raw
