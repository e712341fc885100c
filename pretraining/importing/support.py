"""What a table's row can do here: the rule of a key, and whether this recipe follows what the rule asks for."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from pretraining.config.flags import coerce, field_types
from pretraining.config.validate import CHOICES, LISTS
from pretraining.importing.rules import Reading, Rule, Table

# Of fields that TrainConfig does not have: the values that the recipe has anyway. Any other is unsupported.
ALWAYS: dict[str, tuple[Any, ...]] = {
    "attention_impl": ("auto",),
    "pipeline_cuts": (),
    "transformer_block_type": ("pre_ln",),
}


def find_rule(key: str, table: Table) -> Rule | None:
    """The rule of a key: its own, or that of a family, such as "model.moe.*"."""
    if key in table.rules:
        return table.rules[key]
    return next((rule for name, rule in table.rules.items() if "*" in name and fnmatchcase(key, name)), None)


def nearest(key: str, table: Table) -> str:
    """ "; did you mean ...?" with the key most like it, or that there is none."""
    close = get_close_matches(key, table.rules, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f" of {table.title}'s is known here"


def supported(reading: Reading) -> Reading:
    """The reading, or why this recipe cannot do what it asks for."""
    values: dict[str, Any] = {}
    for name, value in reading.values.items():
        if name not in field_types():
            if value not in ALWAYS.get(name, ()):
                return Reading("unsupported", {name: value}, f"this recipe has no {name}={value} yet")
        else:
            fault = _fault(name, value)
            if fault:
                return Reading("unsupported", {name: value}, fault)
        values[name] = value
    return Reading(reading.status, values, reading.note)


def _fault(name: str, value: Any) -> str:
    """What is wrong with a field's value, if anything."""
    try:
        read = coerce(value, field_types()[name])
    except ValueError:
        return f"{name}={value}: expected {getattr(field_types()[name], '__name__', field_types()[name])}"
    if name in CHOICES and read not in CHOICES[name]:
        return f"{name}={value}: this recipe has {', '.join(choice for choice in CHOICES[name] if choice)}"
    if name in LISTS:
        try:
            LISTS[name][0](str(read))
        except ValueError:
            return f"{name}={value}: {LISTS[name][1]}"
    return ""
