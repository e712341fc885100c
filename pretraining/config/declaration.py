"""How a setting is declared: its type, its range or choices, what it needs, and whether a resumed run may change it.

    lora_alpha: Annotated[float, Above(0), Needs("lora_rank"), Resume.FUNCTION] = 8.0

`settings_of` reads the annotations of a dataclass. Flags, validation, `--help`, docs/settings.md and the comparison
with a checkpoint use what it returns. Does not depend on the settings themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import Field, dataclass, fields
from difflib import get_close_matches
from enum import Enum
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from pretraining.config.grammar import path_fault


class Resume(Enum):
    """What happens if a checkpoint was written with another value of the setting; docs/settings.md prints the text."""

    SHAPE = "refused, because tensors would have another shape"
    FUNCTION = "refused, because the weights would compute another function"
    STATE = "refused, because the checkpoint would hold other tensors"
    RATE = "refused unless override_lr_on_resume is True"
    NOTE = "accepted and printed"
    FREE = "accepted"


@dataclass(frozen=True)
class AtLeast:
    """Numbers from `minimum` on, below `below`; and `special`, a value with a meaning of its own."""

    minimum: float
    below: float = math.inf
    special: float | None = None

    @property
    def requirement(self) -> str:
        upper = "" if self.below == math.inf else f" and below {self.below}"
        return f"at least {self.minimum}{upper}" + ("" if self.special is None else f", or {self.special}")

    def accepts(self, value: Any) -> bool:
        return bool(value == self.special or self.minimum <= value < self.below)


@dataclass(frozen=True)
class Above:
    """Numbers above `bound`, at most `at_most`."""

    bound: float
    at_most: float = math.inf

    @property
    def requirement(self) -> str:
        return f"above {self.bound}" + ("" if self.at_most == math.inf else f" and at most {self.at_most}")

    def accepts(self, value: Any) -> bool:
        return bool(self.bound < value <= self.at_most)


@dataclass(frozen=True)
class OneOf:
    """The keys of a table, or any other collection of texts; `Literal` annotations become one."""

    choices: Collection[str]

    @property
    def requirement(self) -> str:
        """The choices without the empty text, which stands for "not set"."""
        return f"one of {', '.join(filter(None, self.choices))}"

    def accepts(self, value: Any) -> bool:
        return value in self.choices


class KeyOf(NamedTuple):
    """The keys of the table that this class method of the configuration returns, to which extensions add."""

    table: str


@dataclass(frozen=True)
class Grammar:
    """Texts that `parse` reads without a ValueError. A text without a grammar may be a path."""

    parse: Callable[[str], object]
    requirement: str

    def accepts(self, value: Any) -> bool:
        with suppress(ValueError):
            self.parse(value)
            return True
        return False


class Needs(NamedTuple):
    """The setting has an effect only with another one: with this `value` of it, or if None with any but its default."""

    name: str
    value: str | None = None

    def is_met(self, config: Any) -> bool:
        """Whether the other setting has that value."""
        actual = getattr(config, self.name)
        return actual == self.value if self.value else actual != settings_of(type(config))[self.name].default


# A condition on the value of one setting. `requirement` names the values that it accepts, as the end of the sentence
# "must be ..."; `accepts` gets values that are not None.
Constraint = AtLeast | Above | OneOf | Grammar


class Trait(Enum):
    """What else a declaration says of a setting."""

    COMMON = "`--help` shows the setting without being asked for all of them"
    STORABLE = "the path may be in object storage; those of other settings are local"
    PER_HOST = "processes may have different values, because neither the result nor a collective depends on them"


COMMON, STORABLE, PER_HOST = Trait


class Setting(NamedTuple):
    """One field of a configuration, as it is declared."""

    name: str
    kind: type  # str, int, float or bool
    optional: bool  # whether None is a value
    default: Any
    constraint: Constraint | None
    needs: Needs | None
    resume: Resume
    traits: frozenset[Trait]

    @property
    def expected(self) -> str:
        """The type in words, with the default as an example: "expected a whole number, such as 4096"."""
        words = TYPE_WORDS[self.kind] + (" or none" if self.optional else "")
        has_example = type(self.default) in (int, float) and self.default  # 0 and None mean something special
        return f"expected {words}" + (f", such as {self.default}" if has_example else "")

    def read(self, raw: object) -> Any:
        """Return the value of `raw`, a text or a Python value. Raises ValueError with what is expected."""
        text = ",".join(map(str, raw)) if self.kind is str and isinstance(raw, list | tuple) else str(raw)
        if self.kind is str and raw is not None:  # null in a file is no text
            return text
        if self.optional and text.lower() == "none":
            return None
        try:
            return parse_value(text, self.kind)
        except ValueError:
            raise ValueError(self.expected + "; leave it out for the default" * (raw is None)) from None

    def fault(self, value: Any) -> str | None:
        """Return what is wrong with `value`; None if nothing is."""
        if value is None and self.optional:
            return None
        kinds = (int, float) if self.kind is float else (self.kind,)
        if type(value) not in kinds:
            return f"{self.expected}, not the {type(value).__name__} {value!r}"
        if self.kind is str and not self.constraint and (fault := path_fault(value, STORABLE in self.traits)):
            return fault
        if self.constraint and not self.constraint.accepts(value):
            near = get_close_matches(value, self.constraint.choices, 1) if isinstance(self.constraint, OneOf) else []
            return f"must be {self.constraint.requirement}{f'; did you mean {near[0]}?' if near else ''}"
        limit = LARGEST.get(self.kind)
        if limit and abs(value) >= limit and getattr(self.constraint, "below", math.inf) == math.inf:
            return f"must be below {limit:g}"
        return None


LARGEST = {int: 10**15, float: 1e30}  # where no upper bound is declared: products stay below 2^63, and within fp32
TYPE_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def parse_value(text: str, kind: type) -> Any:
    """Return `text` as an int, a finite float or a bool. 1000000, 1_000_000 and 1e6 are the same int.

    Raises ValueError for any other text.
    """
    if kind is bool:
        if text.lower() not in BOOLEANS:
            raise ValueError(text)
        return BOOLEANS[text.lower()]
    if kind is int and "." not in text and "e" not in text.lower():
        return int(text)  # exact, where a float is not
    number = float(text)
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        raise ValueError(text)
    return kind(number)


_DECLARED: dict[type, dict[str, Setting]] = {}


def settings_of(configuration: type) -> dict[str, Setting]:
    """Return the settings of a dataclass by name, in their order. Callers do not change it."""
    if configuration not in _DECLARED:
        hints = get_type_hints(configuration, include_extras=True)
        _DECLARED[configuration] = {f.name: _setting(configuration, f, hints[f.name]) for f in fields(configuration)}
    return _DECLARED[configuration]


def _setting(configuration: type, field: Field[Any], hint: Any) -> Setting:
    """Read one annotation: `T`, `T | None`, `Literal[...]`, or `Annotated` of one of them with its markers."""
    markers = getattr(hint, "__metadata__", ())
    by_kind: dict[type, Any] = {type(marker): marker for marker in markers}
    constraint = next((marker for marker in markers if isinstance(marker, Constraint)), None)
    if key := by_kind.get(KeyOf):
        constraint = OneOf(getattr(configuration, key.table)())
    hint = hint.__origin__ if markers else hint
    if get_origin(hint) is Literal:
        hint, constraint = str, OneOf(get_args(hint))
    kinds = set(get_args(hint) or (hint,))
    (kind,) = kinds - {NoneType}
    return Setting(
        name=field.name,
        kind=kind,
        optional=NoneType in kinds,
        default=field.default,
        constraint=constraint,
        needs=by_kind.get(Needs),
        resume=by_kind.get(Resume, Resume.NOTE),
        traits=frozenset(marker for marker in markers if isinstance(marker, Trait)),
    )
