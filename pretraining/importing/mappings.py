"""The vocabulary of the key tables: what one key of a foreign configuration becomes here.

A table maps a dotted key to a KeyMapping, whose converter takes the key's value and the whole foreign configuration and
returns which of our fields it sets, or why it sets none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.config.errors import Problem

MISSING = "???"  # OmegaConf: a value that the user must give


class Conversion(NamedTuple):
    """What a value becomes. status: "mapped" one to one, "implied" (derived, merged or approximated, as the note
    explains), "ignored" (without meaning here) or "unsupported"."""

    status: str
    values: dict[str, Any]
    note: str = ""


@dataclass(frozen=True)
class ForeignConfig:
    """A configuration of another trainer: its keys, that trainer's defaults, and the flags of the command line."""

    values: Mapping[str, Any]  # dotted key -> value, references replaced
    defaults: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, object] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)  # dotted key -> value before references were replaced
    errors: Mapping[str, str] = field(default_factory=dict)  # dotted key -> why its reference cannot be replaced
    files: Mapping[str, Path] = field(default_factory=dict)  # dotted key -> the file that holds it
    era: str = ""  # GPT-NeoX alone: whose defaults count
    era_reason: str = ""

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return the value of `key`, the trainer's default where it is absent or null, or `otherwise`."""
        value = self.values.get(key)
        if value is None:
            value = self.default(key)
        return otherwise if value is None else value

    def default(self, key: str) -> Any:
        """Return what the trainer takes where `key` is absent, None if nothing: fixed, or a function of the rest."""
        default = self.defaults.get(key)
        return default(self) if callable(default) else default

    def integer(self, key: str, otherwise: int = 1) -> int:
        """Return the whole number that `key` holds; `otherwise` where it holds none, which its own report says."""
        value = self.get(key, otherwise)
        return value if is_integer(value) else otherwise

    def has_flag(self, *names: str) -> bool:
        """Return whether the command line gives one of these flags."""
        return any(name in self.flags for name in names)


class KeyMapping(NamedTuple):
    """The converter of a key, the fields that it may set, and its description in the migration table."""

    convert: Callable[[Any, ForeignConfig], Conversion]
    fields: tuple[str, ...] = ()
    description: str = ""


class Format(NamedTuple):
    """One trainer's files: its keys, what the trainer takes for absent keys, and what must hold across keys."""

    name: str  # as in --import_format
    title: str
    mappings: Mapping[str, KeyMapping]
    defaults: Mapping[str, Any] = {}
    checks: tuple[Callable[[ForeignConfig], Iterable[Problem]], ...] = ()

    def mapping_of(self, key: str) -> KeyMapping | None:
        """Return the mapping of a key: its own, or that of a family such as "model.moe.*"."""
        if key in self.mappings:
            return self.mappings[key]
        families = (mapping for name, mapping in self.mappings.items() if "*" in name and fnmatchcase(key, name))
        return next(families, None)

    def no_such_key(self, key: str) -> str:
        """Return the error about a key without a mapping, with the key that resembles it most."""
        close = get_close_matches(key, self.mappings, n=1, cutoff=0.6)
        return f"no such key; did you mean {close[0]}?" if close else f"no such key of {self.title}'s is known here"


def mapped(**values: Any) -> Conversion:
    """The value one to one."""
    return Conversion("mapped", values)


def implied(note: str, **values: Any) -> Conversion:
    """A value that is derived, merged or approximated, as the note explains."""
    return Conversion("implied", values, note)


def unchanged(note: str) -> Conversion:
    """A value for which this recipe's default is right; another value would change a field."""
    return Conversion("mapped", {}, note)


def ignored(reason: str) -> Conversion:
    """A value without meaning here."""
    return Conversion("ignored", {}, reason)


def unsupported(reason: str) -> Conversion:
    """A value that this recipe cannot follow."""
    return Conversion("unsupported", {}, reason)


# ---- mappings


def to(name: str, note: str = "") -> KeyMapping:
    """The field `name` takes the value as it is; with a note, the key is reported as "implied"."""
    status = "implied" if note else "mapped"
    return KeyMapping(lambda value, _: Conversion(status, {name: value}, note), (name,), note)


def ignore(reason: str) -> KeyMapping:
    """A key without meaning here, whatever its value."""
    return KeyMapping(lambda _, __: ignored(reason), (), f"ignored: {reason}")


def refuse(reason: str) -> KeyMapping:
    """A key that this recipe cannot follow, whatever its value."""
    return KeyMapping(lambda _, __: unsupported(reason), (), f"refused: {reason}")


def read_with(key: str) -> KeyMapping:
    """A key that the mapping of another key reads."""
    return KeyMapping(lambda _, __: implied(f"read with {key}"), (), f"read with {key}")


def only(values: Iterable[Any], reason: str) -> KeyMapping:
    """A key that is ignored while it is null or one of `values`; any other value is refused."""
    allowed = [*values, None]

    def convert(value: Any, _: ForeignConfig) -> Conversion:
        is_allowed = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)
        return ignored("off, as here") if is_allowed else unsupported(reason)

    return KeyMapping(convert, (), f"refused unless {', '.join(map(str, allowed))}: {reason}")


def must_be_off(reason: str) -> KeyMapping:
    """A key that is ignored while its option is off and refused when it is on."""
    return KeyMapping(only((False, 0, 0.0, "", [], {}), reason).convert, (), f"refused where on: {reason}")


def choice(conversions: Mapping[Any, Conversion], description: str = "") -> KeyMapping:
    """One conversion for each value that the key may hold, text in any case; another value is refused."""
    names = tuple(dict.fromkeys(name for conversion in conversions.values() for name in conversion.values))
    known = ", ".join(str(value) for value, conversion in conversions.items() if conversion.status != "unsupported")

    def convert(value: Any, _: ForeignConfig) -> Conversion:
        key = value.lower() if isinstance(value, str) else value
        chosen = conversions.get(key) if isinstance(key, str | bool | int | float) else None
        return chosen or unsupported(f"this value is not known; known are {known}")

    parts = (f"{value}: {_describe(conversion)}" for value, conversion in conversions.items())
    return KeyMapping(convert, names, description or "; ".join(parts))


def _describe(conversion: Conversion) -> str:
    """Return a conversion in a few words: its values, or why there are none."""
    if conversion.status == "unsupported":
        return "refused"
    return ", ".join(str(value) for value in conversion.values.values()) or conversion.note


def is_integer(value: Any) -> bool:
    """Return whether the value is a whole number, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)
