"""The keys of Hugging Face's config.json, as a table of the importer. Needs the extension of their format."""

from __future__ import annotations

from pretraining.extensions.huggingface.description import (
    ACTIVATIONS,
    FAMILIES,
    FIELDS,
    FIXED,
    OTHER,
    PLAIN_ACTIVATIONS,
    ROPE_FIELDS,
    ROPE_TYPES,
)
from pretraining.tools.importing.conversions import mapped, unchanged
from pretraining.tools.importing.mappings import KeyMapping, TrainerFormat, choice, ignore, only, to

_ROPE_TYPE = KeyMapping(to("").convert, ("rope_scaling_type",), ", ".join(ROPE_TYPES))
_ROPE = {**dict.fromkeys(("type", "rope_type"), _ROPE_TYPE), **{key: to(field) for key, field in ROPE_FIELDS.items()}}
_ROPE |= {"rope_theta": to("rope_theta"), "partial_rotary_factor": to("rotary_percentage")}

# The rows of the migration table; nothing is converted with them.
FORMAT = TrainerFormat(
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
