"""The rows of the key tables: dotted key -> KeyMapping, whose converter decides which of our fields the key sets.

A converter takes the key's value and the whole foreign configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from pretraining.config.errors import Problem
from pretraining.tools.importing.conversions import Conversion, differs, ignored, implied, mapped, unsupported_value
from pretraining.tools.importing.foreign import ForeignConfig


class KeyMapping(NamedTuple):
    """The converter of a key, the fields that it may set, and its description in the migration table."""

    convert: Callable[[Any, ForeignConfig], Conversion]
    fields: tuple[str, ...] = ()
    description: str = ""


class TrainerFormat(NamedTuple):
    """One trainer's files: its keys, what the trainer takes for absent keys, and what must hold across keys."""

    name: str  # as in --import_format
    title: str
    mappings: Mapping[str, KeyMapping]
    defaults: Mapping[str, Any] = {}
    checks: tuple[Callable[[ForeignConfig], Iterable[Problem]], ...] = ()
    advice: tuple[Callable[[ForeignConfig], Iterable[Problem]], ...] = ()  # whose problems are warnings
    required: Mapping[tuple[str, ...], str] = {}  # keys without a default there, of which one is given -> our field
    sources: Mapping[str, str] = {}  # key -> where its default is written

    def mapping_of(self, key: str) -> KeyMapping | None:
        """Return the mapping of a key: its own, or that of a family such as "model.moe.*"."""
        if key in self.mappings:
            return self.mappings[key]
        families = (mapping for name, mapping in self.mappings.items() if "*" in name and fnmatchcase(key, name))
        return next(families, None)

    def is_misspelled(self, key: str) -> bool:
        """Return whether a key without a mapping is one letter or so away from another key of its section."""
        section, _, name = key.rpartition(".")
        names = [other.rpartition(".")[2] for other in self.mappings if other.rpartition(".")[0] == section]
        return bool(get_close_matches(name, names, n=1, cutoff=0.9))

    def no_such_key(self, key: str) -> str:
        """Return the error about a key without a mapping, with the key that resembles it most."""
        close = get_close_matches(key, self.mappings, n=1, cutoff=0.6)
        return f"no such key; did you mean {close[0]}?" if close else f"no such key of {self.title}'s is known here"


def to(name: str, note: str = "") -> KeyMapping:
    """The field `name` takes the value as it is; with a note, the key is reported as "implied"."""
    status = "implied" if note else "mapped"
    return KeyMapping(lambda value, _: Conversion(status, {name: value}, note), (name,), note)


def one_switch(name: str, *keys: str) -> KeyMapping:
    """The field `name`, a switch that each of several keys turns on."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        key = next((key for key in keys if not value and source.get(key)), "")
        return implied(f"with {key}", **{name: source.get(key)}) if key else mapped(**{name: value})

    return KeyMapping(convert, (name,))


def ignore(reason: str) -> KeyMapping:
    """A key without meaning here, whatever its value."""
    return KeyMapping(lambda _, __: ignored(reason), (), f"ignored: {reason}")


def differ(reason: str) -> KeyMapping:
    """A key that this recipe follows in another way, whatever its value."""
    return KeyMapping(lambda _, __: differs(reason), (), f"different: {reason}")


def refuse(reason: str) -> KeyMapping:
    """A key that this recipe cannot follow, whatever its value."""
    return KeyMapping(lambda _, __: unsupported_value(reason), (), f"refused: {reason}")


def read_with(key: str) -> KeyMapping:
    """A key that the mapping of another key reads."""
    return KeyMapping(lambda _, __: implied(f"read with {key}"), (), f"read with {key}")


def only(values: Iterable[Any], reason: str, field: str = "") -> KeyMapping:
    """A key that is ignored while it is null or one of `values`; any other value is refused.

    field: ours, which as a flag takes the place of the other value.
    """
    allowed, fields = [*values, None], (field,) if field else ()

    def convert(value: Any, _: ForeignConfig) -> Conversion:
        is_allowed = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)
        return ignored("as here") if is_allowed else unsupported_value(reason, **dict.fromkeys(fields, value))

    return KeyMapping(convert, fields, f"refused unless {', '.join(map(str, allowed))}: {reason}")


def must_be_off(reason: str, field: str = "") -> KeyMapping:
    """A key that is ignored while its option is off and refused when it is on. field: see `only`."""
    return only((False, 0, 0.0, "", [], {}), reason, field)._replace(description=f"refused where on: {reason}")


def choice(conversions: Mapping[Any, Conversion], description: str = "") -> KeyMapping:
    """One conversion for each value that the key may hold, text in any case; another value is refused."""
    names = tuple(dict.fromkeys(name for conversion in conversions.values() for name in conversion.values))
    supported = (str(value) for value, conversion in conversions.items() if conversion.status != "unsupported")
    known = ", ".join(dict.fromkeys(supported))  # 32 may be text, too

    def convert(value: Any, _: ForeignConfig) -> Conversion:
        key = value.lower() if isinstance(value, str) else value
        chosen = conversions.get(key) if isinstance(key, str | bool | int | float) else None
        return chosen or unsupported_value(f"this value is not known; known are {known}")

    parts = dict.fromkeys(f"{value}: {_describe(conversion)}" for value, conversion in conversions.items())
    return KeyMapping(convert, names, description or "; ".join(parts))


def to_one_of(name: str, settings: Mapping[Any, Any], description: str = "") -> KeyMapping:
    """The field `name`, with a table of values: theirs -> ours."""
    return choice({value: mapped(**{name: setting}) for value, setting in settings.items()}, description)


def _describe(conversion: Conversion) -> str:
    """Return a conversion in a few words: its values, or why there are none."""
    if conversion.status == "unsupported":
        return "refused"
    return ", ".join(str(value) for value in conversion.values.values()) or conversion.note


def each(names: str, mapping: KeyMapping, prefix: str = "") -> dict[str, KeyMapping]:
    """One mapping for several keys, separated by blanks."""
    return {prefix + name: mapping for name in names.split()}


def same_names(names: str, prefix: str = "") -> dict[str, KeyMapping]:
    """Keys whose fields have their names."""
    return {prefix + name: to(name) for name in names.split()}
