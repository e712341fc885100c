"""The documentation of every field, read from the source of its dataclass; the page of `--help`; similar flags."""

from __future__ import annotations

import ast
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from inspect import get_annotations, getsource
from itertools import pairwise
from typing import NamedTuple

from pretraining.config.declaration import COMMON, OneOf, Setting, settings_of
from pretraining.config.extension import COMBINED, Extension
from pretraining.config.training import TrainConfig

WIDTH, NARROWEST = 100, 40  # columns of --help, which a terminal may narrow


class Field(NamedTuple):
    """The source of one field."""

    group: str
    name: str
    default: str  # as written: 3e-4, where repr has 0.0003
    text: str  # the docstring below it, on one line


def documented_fields(configuration: type = TrainConfig) -> dict[str, list[Field]]:
    """Return the fields of a configuration by group: the core's first, then those of its subclasses.

    Those of extensions outside this package, such as a notebook's, are left out: their source may be nowhere.
    """
    groups: dict[str, list[Field]] = {}
    for part in reversed(configuration.__mro__):
        if part.__module__ != COMBINED and part.__module__.startswith("pretraining.") and get_annotations(part):
            source = getsource(sys.modules[part.__module__])
            for group, fields in fields_in(source, part.__name__).items():
                groups.setdefault(group, []).extend(fields)
    return groups


def fields_in(source: str, name: str = "Settings") -> dict[str, list[Field]]:
    """Return the fields of the class `name` in `source`. Raises ValueError that names those without documentation."""
    (tree,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    headings = {i: match[1] for i, line in enumerate(source.splitlines()) if (match := HEADING.fullmatch(line))}
    groups: dict[str, list[Field]] = {heading: [] for heading in headings.values()}
    undocumented = []
    lines = source.splitlines()
    for node, following in pairwise([*tree.body, None]):
        if not isinstance(node, ast.AnnAssign):
            continue
        above = [heading for line, heading in headings.items() if line < node.lineno]
        match following:
            case ast.Expr(value=ast.Constant(value=str(text))) if above and node.value:
                default = lines[node.value.lineno - 1][node.value.col_offset : node.value.end_col_offset]
                groups[above[-1]].append(Field(above[-1], ast.unparse(node.target), default, " ".join(text.split())))
            case _:
                undocumented.append(ast.unparse(node.target))
    if undocumented:
        needs = "a default, a docstring below it and a '# ---- Group' above it"
        raise ValueError(f"{name}: {', '.join(undocumented)}: every field needs {needs}")
    return groups


HEADING = re.compile(r" +# ---- (.+)")


def type_words(setting: Setting) -> str:
    """Return type and range or choices: "int or None, at least 1"."""
    if isinstance(setting.constraint, OneOf):
        return ", ".join(choice or '""' for choice in setting.constraint.choices)
    kind = setting.kind.__name__ + (" or None" if setting.optional else "")
    return f"{kind}, {setting.constraint.requirement}" if setting.constraint else kind


def needs_words(setting: Setting) -> str:
    """Return the sentence that names the setting that it needs, or nothing."""
    if setting.needs is None:
        return ""
    return f" Needs {setting.needs.name}{(setting.needs.value and f'={setting.needs.value}') or ''}."


# ---- --help


def help_text(word: str = "", configuration: type = TrainConfig) -> str:
    """Return the page of `--help=word`: the settings whose name or text has `word`; "all": all; "": the common ones."""
    lines = [
        "python main_training.py --name=value ...",
        "",
        *_wrapped("Also: --name value; --name and --no-name for True and False. The last of a repeated flag counts."),
        "",
    ]
    settings, count = settings_of(configuration), 0
    for group, fields in documented_fields(configuration).items():
        shown = [field for field in fields if _is_shown(field, word, settings[field.name])]
        lines += (
            [group, *(line for field in shown for line in _help_lines(field, settings[field.name])), ""]
            if shown
            else []
        )
        count += len(shown)
    more = f"{count} of {len(settings)} settings; --help=all shows all, --help=WORD those with WORD in name or text."
    return "\n".join([*lines, *_wrapped(more)])


def _wrapped(text: str, indent: str = "") -> list[str]:
    width = min(max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST), WIDTH)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)


def _is_shown(field: Field, word: str, setting: Setting) -> bool:
    if not word:
        return COMMON in setting.traits
    return word == "all" or word.lower().replace("-", "_") in field.name or word.lower() in field.text.lower()


def _help_lines(field: Field, setting: Setting) -> list[str]:
    text = f"({type_words(setting)}) {field.text}{needs_words(setting)}"
    head = f"  --{field.name}={field.default.strip(chr(34))}"
    return [head, *_wrapped(text, " " * 6)]


@dataclass(frozen=True)
class DocumentedConfig(TrainConfig):
    """A configuration that reads its documentation."""

    @classmethod
    def help_page(cls, word: str) -> str:
        """See TrainConfig."""
        return help_text(word, cls)

    @classmethod
    def meant_by(cls, word: str) -> list[str]:
        """See TrainConfig: the documentation of a field may end with "Elsewhere:" and such names."""
        fields = [field for group in documented_fields(cls).values() for field in group]
        elsewhere = [
            field.name for field in fields if word in re.findall(r"\w+", field.text.partition(" Elsewhere: ")[2])
        ]
        return elsewhere or nearest_settings(word, settings_of(cls))


def nearest_settings(word: str, settings: Mapping[str, Setting]) -> list[str]:
    """Return the settings of these initials or words, or the most similar ones."""
    name = word.replace("-", "_").lower()
    near = [field for field in settings if name == "".join(part[0] for part in field.split("_"))]
    near = [field for field in near if COMMON in settings[field].traits] or near
    if not near and "_" in name:
        near = [field for field in settings if _has_words(field, name)]
    if not near or name in near:
        close = get_close_matches(name, settings, n=3, cutoff=0.75)
        near = [field for field in close if _likeness(name, field) > _likeness(name, close[0]) - 0.05]
    return near


def _has_words(field: str, name: str) -> bool:
    """Return whether the words of `name` are words of `field`, in their order."""
    words = iter(field.split("_"))
    return all(word in words for word in name.split("_"))


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


EXTENSION = Extension(configuration=DocumentedConfig)
