"""The dimensions of a model from Hugging Face's config.json, for --model_config_path and --ckpt_load_path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.config.errors import Problem
from pretraining.config.variants import VARIANTS
from pretraining.extensions.huggingface.description import (
    ACTIVATIONS,
    CONFIG,
    FAMILIES,
    FIELDS,
    FIXED,
    OTHER,
    PLAIN_ACTIVATIONS,
    ROPE_FIELDS,
    ROPE_TYPES,
    ModelDescription,
    describes_model,
)
from pretraining.tools.importing.conversions import mapped, unchanged
from pretraining.tools.importing.mappings import Format, KeyMapping, choice, ignore, only, to
from pretraining.tools.importing.reading import read_file

_ROPE_TYPE = KeyMapping(to("").convert, ("rope_scaling_type",), ", ".join(ROPE_TYPES))
_ROPE = {**dict.fromkeys(("type", "rope_type"), _ROPE_TYPE), **{key: to(field) for key, field in ROPE_FIELDS.items()}}
_ROPE |= {"rope_theta": to("rope_theta"), "partial_rotary_factor": to("rotary_percentage")}

# The rows of the migration table; nothing is converted with them.
FORMAT = Format(
    "huggingface",
    "Hugging Face's config.json",
    {
        "model_type": choice(
            {
                name: mapped(**family.fields) if family.fields else unchanged("Llama")
                for name, family in FAMILIES.items()
            }
        ),
        **{key: to(field) for key, field in FIELDS.items()},
        "sliding_window": KeyMapping(to("").convert, ("sliding_window",), "of Mistral"),
        "layer_types": KeyMapping(to("").convert, (), "full attention in all of them"),
        "hidden_act": choice(
            {key: mapped(activation=activation) for key, activation in ACTIVATIONS.items()},
            ", ".join(f"{key}: {name} (GPT-NeoX: {PLAIN_ACTIVATIONS[key]})" for key, name in ACTIVATIONS.items()),
        ),
        **{
            f"{group}.{key}": mapping for group in ("rope_scaling", "rope_parameters") for key, mapping in _ROPE.items()
        },
        **{key: only((value,), "another function") for key, value in FIXED.items()},
        **dict.fromkeys(OTHER, ignore("nothing of the model's shape")),
    },
)


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
    model = ModelDescription(read_file(path))
    origins = {field: f"{origin} in {path}" for field, origin in model.origins.items()}
    problems = [problem._replace(subject=f"{path}: {problem.subject}") for problem in model.problems]
    misspelled = {key: value for key, value in model.unknown.items() if FORMAT.is_misspelled(key)}
    problems += [Problem(f"{path}: {key}={value}", FORMAT.no_such_key(key)) for key, value in misspelled.items()]
    others = ", ".join(key for key in model.unknown if key not in misspelled)
    notes = [Problem(str(path), f"not read, as in transformers: {others}")] if others else []
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
    return path if flags.get("ckpt_load_path") and path.is_file() and describes_model(read_file(path)) else None
