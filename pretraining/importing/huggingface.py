"""The dimensions of a model from Hugging Face's config.json, for --model_config_path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretraining.config.errors import Problem
from pretraining.config.flags import first_rank
from pretraining.config.huggingface import (
    ACTIVATIONS,
    FAMILIES,
    FIELDS,
    FIXED,
    OTHER,
    ROPE_FIELDS,
    ROPE_TYPES,
    ModelDescription,
)
from pretraining.importing.conversions import mapped, unchanged
from pretraining.importing.mappings import Format, KeyMapping, choice, ignore, only, to
from pretraining.importing.reading import read_file

_ROPE_TYPE = KeyMapping(to("").convert, ("rope_scaling_type",), ", ".join(ROPE_TYPES))
_ROPE = {**dict.fromkeys(("type", "rope_type"), _ROPE_TYPE), **{key: to(field) for key, field in ROPE_FIELDS.items()}}
_ROPE["rope_theta"] = to("rope_theta")

# The rows of the migration table; nothing is converted with them.
FORMAT = Format(
    "huggingface",
    "Hugging Face's config.json",
    {
        "model_type": choice(
            {family: mapped(qk_norm=True) if family == "qwen3" else unchanged("this model") for family in FAMILIES}
        ),
        **{key: to(field) for key, field in FIELDS.items()},
        "sliding_window": KeyMapping(to("").convert, ("sliding_window",), "of Mistral"),
        "layer_types": KeyMapping(to("").convert, (), "full attention in all of them"),
        "hidden_act": choice({key: mapped(activation=activation) for key, activation in ACTIVATIONS.items()}),
        **{
            f"{group}.{key}": mapping for group in ("rope_scaling", "rope_parameters") for key, mapping in _ROPE.items()
        },
        **{key: only((value,), "another function") for key, value in FIXED.items()},
        **dict.fromkeys(OTHER, ignore("nothing of the model's shape")),
    },
)


def model_flags(path: str) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Return the settings in the config.json at `path`, "key=value in FILE" for each, and the problems.

    Nothing where `path` is empty. Prints the keys that no model of the family reads. Raises UserError if the file
    cannot be read.
    """
    if not path:
        return {}, {}, []
    model = ModelDescription(read_file(Path(path)))
    problems = [problem._replace(subject=f"{path}: {problem.subject}") for problem in model.problems]
    misspelled = {key: value for key, value in model.unknown.items() if FORMAT.is_misspelled(key)}
    problems += [Problem(f"{path}: {key}={value}", FORMAT.no_such_key(key)) for key, value in misspelled.items()]
    if (others := ", ".join(key for key in model.unknown if key not in misspelled)) and first_rank():
        print(f"{path}: not read, as in transformers: {others}")
    return model.fields, {field: f"{origin} in {path}" for field, origin in model.origins.items()}, problems
