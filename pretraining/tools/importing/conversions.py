"""What the value of one foreign key becomes."""

from __future__ import annotations

from typing import Any, NamedTuple


class Conversion(NamedTuple):
    """What a value becomes. status: "mapped" one to one, "implied" (derived or merged, as the note explains),
    "different" (this recipe does it in another way, which the note names), "ignored" (without meaning here) or
    "unsupported"."""

    status: str
    values: dict[str, Any]
    note: str = ""


def mapped(**values: Any) -> Conversion:
    """The value one to one."""
    return Conversion("mapped", values)


def implied(note: str, **values: Any) -> Conversion:
    """A value that is derived or merged, as the note explains."""
    return Conversion("implied", values, note)


def differs(note: str, **values: Any) -> Conversion:
    """A value that this recipe follows in another way than its trainer, which the note names."""
    return Conversion("different", values, note)


def precision(name: str, note: str = "") -> Conversion:
    """A precision and the switch that goes with it."""
    values = {"precision": name, "mixed_precision": name != "fp32"}
    return Conversion("implied" if note else "mapped", values, note)


def unchanged(note: str) -> Conversion:
    """A value for which this recipe's default is right; another value would change a field."""
    return Conversion("mapped", {}, note)


def ignored(reason: str) -> Conversion:
    """A value without meaning here."""
    return Conversion("ignored", {}, reason)


def unsupported_value(reason: str, **values: Any) -> Conversion:
    """A value that this recipe cannot follow. values: fields that, given as flags, take its place."""
    return Conversion("unsupported", values, reason)
