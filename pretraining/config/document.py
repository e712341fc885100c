"""The documentation of every field, read from the source of the dataclass: `--help` and the tables of configs.md.

pretraining/tools/document.py writes the pages.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from pretraining.config import training
from pretraining.config.declaration import OneOf, Resume, Setting
from pretraining.config.optimizers import FLAGS, OPTIMIZERS
from pretraining.config.support import LIMITS
from pretraining.config.training import SETTINGS
from pretraining.config.variants import VARIANTS

WIDTH = 100  # columns of --help


class Field(NamedTuple):
    """The source of one field."""

    group: str
    name: str
    default: str  # as written: 3e-4, where repr has 0.0003
    text: str  # the docstring below it, on one line


def documented_fields() -> dict[str, list[Field]]:
    """Return the fields of TrainConfig by group, both in the order of the source."""
    return fields_in(inspect.getsource(training))


def fields_in(source: str) -> dict[str, list[Field]]:
    """Return the fields of the TrainConfig in `source`. Raises ValueError that names those without documentation."""
    (tree,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "TrainConfig")
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
        raise ValueError(f"TrainConfig: {', '.join(undocumented)}: every field needs {needs}")
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


def help_text(word: str = "") -> str:
    """Return the page of `--help=word`: the settings whose name or text has `word`; "all": all; "": the common ones."""
    lines = [
        "python main_training.py --name=value ...",
        "",
        "Also: --name value; --name and --no-name for True and False. The last of a repeated flag counts.",
        "",
    ]
    found = 0
    for group, fields in documented_fields().items():
        shown = [field for field in fields if _is_shown(field, word)]
        lines += [group, *(line for field in shown for line in _help_lines(field)), ""] if shown else []
        found += len(shown)
    more = f"{found} of {len(SETTINGS)} settings; --help=all shows all, --help=WORD those with WORD in name or text."
    return "\n".join([*lines, more])


def _is_shown(field: Field, word: str) -> bool:
    if not word:
        return SETTINGS[field.name].is_common
    return word == "all" or word.lower().replace("-", "_") in field.name or word.lower() in field.text.lower()


def _help_lines(field: Field) -> list[str]:
    setting = SETTINGS[field.name]
    text = f"({type_words(setting)}) {field.text}{needs_words(setting)}"
    head = f"  --{field.name}={field.default.strip(chr(34))}"
    return [head, *textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]


# ---- configs.md


def variant_table() -> str:
    """Return every variant with its dimensions and the number of its parameters."""
    shapes = "layers | hidden | feed-forward | heads (key/value) | vocabulary | sequence"
    names: dict[int, list[str]] = {}  # short names have the same shape object
    for name, shape in VARIANTS.items():
        names.setdefault(id(shape), []).append(f"`{name}`")
    rows = []
    for shape in {id(shape): shape for shape in VARIANTS.values()}.values():
        heads = f"{shape.num_attention_heads} ({shape.num_kv_heads})"
        counts = f"{shape.parameters / 1e6:,.0f} M | {shape.embedding_parameters / 1e6:,.0f} M | {shape.num_layers}"
        sizes = f"{shape.hidden_size} | {shape.intermediate_size} | {heads} | {shape.vocab_size}"
        rows.append(f"{', '.join(names[id(shape)])} | {counts} | {sizes} | {shape.max_position_embeddings}")
    return markdown_table(f"variant | parameters | of which embeddings | {shapes}", rows)


def markdown_table(columns: str, rows: Iterable[str]) -> str:
    """Return a table whose header and rows are texts with " | " between the cells."""
    rule = "---|" * (columns.count(" | ") + 1)
    return "\n".join([f"| {columns} |", f"|{rule}", *(f"| {row} |" for row in rows)])


def flag_tables() -> str:
    """Return one Markdown table for each group, and those of optimizers, engine support and resume."""
    flags = [_table(group, fields) for group, fields in documented_fields().items()]
    return "\n\n".join([*flags, optimizer_table(), support_table(), resume_table()])


def support_table() -> str:
    """Return the settings that an engine does not support."""
    rows = (f"`{row.setting}` | {row.values_text} | {', '.join(row.missing_on)} | {row.reason}" for row in LIMITS)
    table = markdown_table("flag | values | not supported by engine | reason", rows)
    return f"### Settings that one engine does not support\n\n{table}"


def resume_table() -> str:
    """Return what happens to each setting that differs from the checkpoint's when a run continues."""
    rows = []
    for policy in Resume:
        names = [f"`{name}`" for name, setting in SETTINGS.items() if setting.resume is policy]
        rows.append(f"{policy.value} | {'all others' if policy is Resume.NOTE else ', '.join(names)}")
    return f"### Changes when a run continues\n\n{markdown_table('a change is | flags', rows)}"


def optimizer_table() -> str:
    """Every optimizer with its defaults."""
    columns = "optimizer | learning_rate | weight_decay | settings; of those with a flag of their own, its name"
    rows = (
        f"`{name}` | {rate:g} | {'none' if decay is None else decay} | {', '.join(map(_setting, taken.items()))}"
        for name, (rate, decay, taken) in OPTIMIZERS.items()
    )
    return f"### Optimizers and their defaults\n\n{markdown_table(columns, rows)}"


def _setting(item: tuple[str, Any]) -> str:
    name, value = item
    return f"`{FLAGS[name] if name in FLAGS and not isinstance(value, tuple) else name}={value}`"


def _table(group: str, fields: list[Field]) -> str:
    rows = []
    for field in fields:
        setting = SETTINGS[field.name]
        words, text = cell(type_words(setting)), cell(field.text + needs_words(setting))
        rows.append(f"`{field.name}` | {words} | `{field.default}` | {text}")
    return f"### {group}\n\n{markdown_table('flag | type or choices | default | meaning', rows)}"


def cell(text: str) -> str:
    """Text that stays inside its cell, with placeholders such as <log_dir> shown and not taken for HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
