"""Turn configuration files into flags: the one function of this room that a run calls.

--config_file holds settings with our own names, --import_config is a file of NxD Training, NeMo Megatron or GPT-NeoX,
and --model_config_path is Hugging Face's config.json. Each is read once. A flag of the command line wins over
--config_file, which wins over --import_config, which wins over --model_config_path.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from pretraining.config.declaration import Setting, settings_of
from pretraining.config.errors import Problem, UserError
from pretraining.config.extension import FileFlags
from pretraining.config.flags import first_rank, is_script_setting, read_values
from pretraining.config.grammar import without_credentials
from pretraining.config.training import TrainConfig
from pretraining.config.validate import Check
from pretraining.tools.importing.formats import FORMATS, format_by_own_keys
from pretraining.tools.importing.model_file import ModelFlags, find_config_json, model_flags
from pretraining.tools.importing.reading import read_mapping
from pretraining.tools.importing.report import as_data, as_text, describe_differences, write_report
from pretraining.tools.importing.resolve import import_foreign
from pretraining.tools.importing.settings import FileConfig


def flags_from_files(
    flags: Mapping[str, object], configuration: type[TrainConfig], checks: Iterable[Check] = (), report: bool = True
) -> FileFlags:
    """Return `flags` merged with the files that they name. Raises UserError if one of them cannot be read.

    report: on the first process, print what became of each key of --import_config and write it to --import_report;
    with --import_only and no file to import, print the settings alone. checks: rules across settings, whose problems
    are in the report too.
    """
    own = _read_config_file(flags)
    given = {**own.values, **flags}
    given.pop("config_file", None)
    origins = {name: origin for name, origin in own.origins.items() if name not in flags}
    report, settings = report and first_rank(), settings_of(configuration)
    if given.get("import_config"):
        result = import_foreign(given, checks, configuration)
        if report:
            data = as_data(result, str(given.get("import_lr_steps", "")))
            print(without_credentials(as_text(result, data)))
            write_report(data, str(given.get("import_report", "")))
        return FileFlags(result.flags, {**result.origins, **origins}, [*own.problems, *result.problems])
    if find_config_json(given) and is_script_setting("model_variant", given.get("model_variant")):
        del given["model_variant"]  # only a variant that the user names replaces that of the file
    model, adapter = model_flags(given), adapter_flags(given, settings)
    given.pop("model_config_path", None)
    below = {**model.origins, **adapter.origins}
    origins |= {name: origin for name, origin in below.items() if name not in given}
    values = {**model.values, **adapter.values, **given}
    problems = [*own.problems, *model.problems, *adapter.problems]
    config, mistakes = read_values(values, checks, configuration, missing_matters=False)
    assert isinstance(config, FileConfig)
    if report and not problems and not mistakes:
        for note in [*_replaced(own, flags, settings), *_replaced(model, given, settings), *model.notes]:
            print(without_credentials(f"note: {note.subject}: {note.remedy}"))
    if report and config.import_only and not problems and not mistakes:
        print(without_credentials("\n".join(describe_differences(config))))
    return FileFlags(values, origins, problems)


def adapter_flags(flags: Mapping[str, object], settings: Container[str]) -> FileFlags:
    """Return the settings of the adapter at --lora_load_path; none if it has no file, which the run reports."""
    path = Path(str(flags.get("lora_load_path") or ""), str(flags.get("lora_load_tag") or ""), "adapter_config.json")
    if "lora_load_path" not in settings or not flags.get("lora_load_path") or not path.is_file():
        return FileFlags({}, {}, [])
    from pretraining.extensions.lora.peft import PEFT_SETTINGS, peft_settings

    adapter = read_mapping(path)
    try:
        values = peft_settings(adapter)
    except ValueError as error:
        return FileFlags({}, {}, [Problem(f"{path}: {error}", "PEFT writes no such value")])
    origins = {field: f"{key}={adapter.get(key)} in {path}" for key, field in PEFT_SETTINGS.items()}
    return FileFlags(values, origins, [])


def _read_config_file(flags: Mapping[str, object]) -> FileFlags:
    """Return the settings in --config_file. Those in a section are read as if they stood above it."""
    path = str(flags.get("config_file") or "")
    if not path:
        return FileFlags({}, {}, [])
    tree = read_mapping(Path(path))
    if name := format_by_own_keys(tree):
        raise UserError(f"--config_file={path}: is a file of {FORMATS[name].title}: use --import_config")
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


def _replaced(
    file: FileFlags | ModelFlags, flags: Mapping[str, object], settings: Mapping[str, Setting]
) -> list[Problem]:
    """Return a note for each flag that has another value than the file below it."""
    return [
        Problem(f"--{name}={flags[name]}", f"replaces {origin}")
        for name, origin in file.origins.items()
        if name in flags and _read_value(settings, name, flags[name]) != _read_value(settings, name, file.values[name])
    ]


def _read_value(settings: Mapping[str, Setting], name: str, raw: object) -> object:
    with suppress(ValueError):
        return settings[name].read(raw)
    return raw
