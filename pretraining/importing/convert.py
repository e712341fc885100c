"""Convert one key, and refuse what this recipe cannot do with the result."""

from __future__ import annotations

from typing import Any

from pretraining.config.declaration import Above, AtLeast
from pretraining.config.training import SETTINGS
from pretraining.importing.conversions import Conversion, unsupported
from pretraining.importing.foreign import ForeignConfig
from pretraining.importing.mappings import KeyMapping

# Fields that TrainConfig does not have -> the values that describe this recipe. Any other value is unsupported.
FIXED: dict[str, tuple[Any, ...]] = {
    "attention_impl": ("auto",),
    "pipeline_cuts": (),
    "transformer_block_type": ("pre_ln",),
}


def convert(mapping: KeyMapping, value: Any, foreign: ForeignConfig) -> Conversion:
    """Return the conversion, or why this recipe cannot do what it asks for."""
    try:
        conversion = mapping.convert(value, foreign)
    except (TypeError, ValueError, ArithmeticError):  # a converter computed with what is no number
        return unsupported("this value is of another kind than the key takes")
    for name, setting in conversion.values.items():
        if mistake := _mistake(name, setting):
            return Conversion("unsupported", {name: setting}, mistake)
    return conversion


def _mistake(name: str, value: Any) -> str:
    """Return what is wrong with a field's value, or nothing. Ranges of numbers are checked with all other settings."""
    setting = SETTINGS.get(name)
    if setting is None:
        return "" if value in FIXED.get(name, ()) else f"this recipe has no {name}={value} yet"
    try:
        converted = setting.read(value)
    except ValueError as error:
        return f"{name}={value}: {error}"
    fault = None if isinstance(setting.constraint, Above | AtLeast) else setting.fault(converted)
    return f"{name}={value}: {fault}" if fault else ""
