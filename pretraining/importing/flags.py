"""Turn configuration files into flags: the one function of this room that main_training.py calls.

--config_file holds settings with our own names, --import_config is a file of NxD Training, NeMo Megatron or GPT-NeoX,
and --model_config_path is Hugging Face's config.json. Each is read once. A flag of the command line wins over
--config_file, which wins over --import_config, which wins over --model_config_path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.config.errors import Problem
from pretraining.config.flags import first_rank, read_values
from pretraining.config.validate import Check
from pretraining.importing.huggingface import model_flags
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
    given, origins = _merge_config_file(flags)
    report = report and first_rank()
    if given.get("import_config"):
        result = import_foreign(given, checks)
        if report:
            data = as_data(result, str(given.get("import_lr_steps", "")))
            print(as_text(result, data))
            write_report(data, str(given.get("import_report", "")))
        return FileFlags(result.flags, {**result.origins, **origins}, result.problems)
    below, below_origins, problems = model_flags(str(given.pop("model_config_path", "")))
    origins |= {name: origin for name, origin in below_origins.items() if name not in given}
    values = {**below, **given}
    config, mistakes = read_values(values, checks, missing_matters=False)
    if report and config.import_only and not problems and not mistakes:
        print("\n".join(describe_differences(config)))
    return FileFlags(values, origins, problems)


def _merge_config_file(flags: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return `flags` over the settings in --config_file, and the origins of those that count."""
    given = dict(flags)
    path = str(given.pop("config_file", ""))
    if not path:
        return given, {}
    settings = {name: value for name, value in read_file(Path(path)).items() if name not in ("config_file", *given)}
    return {**settings, **given}, {name: f"{name}={value} in {path}" for name, value in settings.items()}
