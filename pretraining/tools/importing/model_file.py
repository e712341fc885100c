"""The dimensions of a model from Hugging Face's config.json, for --model_config_path and --ckpt_load_path.

The extension of their format reads the file; without it, a folder at --ckpt_load_path is none of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.config.errors import Problem
from pretraining.config.variants import VARIANTS
from pretraining.tools.importing.reading import read_mapping

CONFIG = "config.json"


class ModelFlags(NamedTuple):
    """What a config.json gives."""

    values: dict[str, Any]  # by field
    origins: dict[str, str]  # field -> "key=value in FILE"
    problems: list[Problem]  # what this recipe cannot follow
    notes: list[Problem]  # what does not count


def model_flags(flags: Mapping[str, object]) -> ModelFlags:
    """Return the settings of --model_config_path or, without it, of a Hugging Face folder at --ckpt_load_path.

    A --model_variant in `flags` gives the dimensions instead. Raises UserError if the file cannot be read.
    """
    path = find_config_json(flags)
    if not path:
        return ModelFlags({}, {}, [], [])
    from pretraining.extensions.huggingface.description import ModelDescription
    from pretraining.tools.importing.huggingface import FORMAT

    model = ModelDescription(read_mapping(path))
    origins = {field: f"{origin} in {path}" for field, origin in model.origins.items()}
    problems = [problem._replace(subject=f"{path}: {problem.subject}") for problem in model.problems]
    unknown = {key: value for key, value in model.unknown.items() if key not in FORMAT.mappings}
    misspelled = {key: value for key, value in unknown.items() if FORMAT.is_misspelled(key)}
    problems += [Problem(f"{path}: {key}={value}", FORMAT.no_such_key(key)) for key, value in misspelled.items()]
    others = ", ".join(key for key in model.unknown if key not in misspelled)
    notes = [Problem(str(path), f"not read, as in transformers: {others}")] if others else []
    if "bos_token" not in flags and flags.get("ckpt_load_path") and (token := first_token(path.parent)) is not None:
        remedy = f"--bos_token={token} puts it before documents, unless the data have it"
        notes.append(Problem(str(path.parent), f"its tokenizer begins texts with id {token}: {remedy}"))
    variant = flags.get("model_variant")
    shape = VARIANTS.get(str(variant))
    for field in [field for field in model.origins if hasattr(shape, field) and field not in flags]:
        if (value := getattr(shape, field)) != model.fields.pop(field):
            notes.append(Problem(f"--model_variant={variant}", f"has {field}={value} instead of {origins[field]}"))
    origins = {field: origin for field, origin in origins.items() if field in model.fields}
    return ModelFlags(model.fields, origins, problems, notes)


def find_config_json(flags: Mapping[str, object]) -> Path | None:
    """Return the config.json that the flags name, by itself or with its folder."""
    if named := str(flags.get("model_config_path") or ""):
        return Path(named, CONFIG) if Path(named).is_dir() else Path(named)
    path = Path(str(flags.get("ckpt_load_path") or ""), CONFIG)
    return path if flags.get("ckpt_load_path") and path.is_file() and is_description(read_mapping(path)) else None


def first_token(folder: Path) -> int | None:
    """Return the id that the tokenizer.json in a folder puts before every text; None if it puts none there."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # a file that this run does not need
        processor = json.loads((folder / "tokenizer.json").read_bytes())["post_processor"]
        for part in processor.get("processors", [processor]):
            first: dict[str, Any] = next(iter(part.get("single", [])), {})
            if "SpecialToken" in first:
                return int(part["special_tokens"][first["SpecialToken"]["id"]]["ids"][0])
    return None


def is_description(config: Mapping[str, Any]) -> bool:
    """Return whether a file describes a model in Hugging Face's format."""
    if not find_spec("pretraining.extensions.huggingface"):
        return False
    from pretraining.extensions.huggingface.description import describes_model

    return describes_model(config)
