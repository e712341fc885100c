"""The language of the tables: what one key of a foreign configuration comes to here.

A table maps a source's dotted key to a Rule. A rule reads the key's value, with the whole source at hand, and says
which of our fields it sets, or why it sets none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.config.errors import Problem


class Reading(NamedTuple):
    """What a value came to: "mapped" one to one, "implied" (derived, merged or approximated: the note says how),
    "ignored" (without meaning here) or "unsupported"."""

    status: str
    values: dict[str, Any]
    note: str = ""


@dataclass(frozen=True)
class Source:
    """A foreign configuration: its keys, what its trainer takes for absent ones, and the flags on the command line."""

    leaves: Mapping[str, Any]  # dotted key -> value, references replaced
    defaults: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, object] = field(default_factory=dict)
    folder: Path = Path()
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the format itself, such as NeoX's era

    def get(self, key: str, otherwise: Any = None) -> Any:
        """The value of `key`, the source's default where it is absent or null, or `otherwise`."""
        value = self.leaves.get(key)
        if value is None and key in self.defaults:
            value = default_of(self.defaults[key], self)
        return otherwise if value is None else value

    def number(self, key: str, otherwise: int = 1) -> int:
        """The whole number that `key` holds; `otherwise` where it holds none (its own record says so)."""
        value = self.get(key, otherwise)
        return value if isinstance(value, int) and not isinstance(value, bool) else otherwise

    def knows(self, *names: str) -> bool:
        """Whether the command line gives one of these flags."""
        return any(name in self.flags for name in names)


def default_of(default: Any, source: Source) -> Any:
    """An absent key's value: fixed, or a function of the source."""
    return default(source) if callable(default) else default


class Rule(NamedTuple):
    """How a key is read, the fields it may set, and the sentence of the migration table."""

    read: Callable[[Any, Source], Reading]
    fields: tuple[str, ...] = ()
    words: str = ""


class Table(NamedTuple):
    """One format: its keys, what its trainer takes for keys that are absent, and what must hold across keys."""

    title: str
    rules: Mapping[str, Rule]
    absent: Mapping[str, Any]
    checks: tuple[Callable[[Source], Iterable[Problem]], ...] = ()


def mapped(**values: Any) -> Reading:
    """The value one to one."""
    return Reading("mapped", values)


def implied(note: str, **values: Any) -> Reading:
    """A value that is derived, merged or approximated, as the note says."""
    return Reading("implied", values, note)


def rests(note: str) -> Reading:
    """A value that leaves this recipe's default as it is, where another value would not."""
    return Reading("mapped", {}, note)


def ignored(reason: str) -> Reading:
    """Without meaning here."""
    return Reading("ignored", {}, reason)


def refused(reason: str) -> Reading:
    """Cannot be done here."""
    return Reading("unsupported", {}, reason)


# ---- rules


def to(name: str, note: str = "") -> Rule:
    """The field `name` takes the value as it is; with a note, the record is "implied"."""
    return Rule(lambda value, _: Reading("implied" if note else "mapped", {name: value}, note), (name,), note)


def no_op(reason: str) -> Rule:
    """A key without meaning here, whatever its value."""
    return Rule(lambda _, __: ignored(reason), (), f"ignored: {reason}")


def read_with(key: str) -> Rule:
    """A key whose value the rule of another key takes in."""
    return Rule(lambda _, __: implied(f"read with {key}"), (), f"read with {key}")


def unless(idle: Iterable[Any], reason: str) -> Rule:
    """Nothing to do while the value is one of `idle`; any other is refused."""
    quiet = [*idle, None]
    said = ", ".join(str(value) for value in quiet)

    def read(value: Any, _: Source) -> Reading:
        asleep = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in quiet)
        return ignored("off, as here") if asleep else refused(reason)

    return Rule(read, (), f"refused unless {said}: {reason}")


def off(reason: str) -> Rule:
    """Nothing to do while the option is off; refused when it is on."""
    return Rule(unless((False, 0, 0.0, "", [], {}), reason).read, (), f"refused where on: {reason}")


def choice(readings: Mapping[Any, Reading], words: str = "") -> Rule:
    """One reading for each value that the key may hold; text in any case. Another value is refused."""
    names = tuple(dict.fromkeys(name for reading in readings.values() for name in reading.values))
    known = ", ".join(str(value) for value, reading in readings.items() if reading.status != "unsupported")

    def read(value: Any, _: Source) -> Reading:
        key = value.lower() if isinstance(value, str) else value
        found = readings.get(key) if isinstance(key, str | bool | int | float) else None
        return found or refused(f"this value is not known; known are {known}")

    said = "; ".join(f"{value}: {_comes_to(reading)}" for value, reading in readings.items())
    return Rule(read, names, words or said)


def _comes_to(reading: Reading) -> str:
    """A reading in a few words: its values, or why there are none."""
    if reading.status == "unsupported":
        return "refused"
    return ", ".join(str(value) for value in reading.values.values()) or reading.note


def whole(value: Any) -> bool:
    """A whole number, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)
