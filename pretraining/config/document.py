"""The documentation of every field, read from the source of the dataclass: `--help` and the tables of configs.md.

pretraining/document.py writes the page.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from itertools import pairwise
from typing import Any, NamedTuple

from pretraining.config import training
from pretraining.config.optimizers import FLAGS, OPTIMIZERS

WIDTH = 100  # columns of --help


class Field(NamedTuple):
    """One field as its source says it."""

    group: str
    name: str
    kind: str  # annotation: "int | None"
    default: str  # as Python writes it
    words: str  # its docstring on one line


def documented_fields() -> list[Field]:
    """The fields of TrainConfig in their order."""
    return fields_in(inspect.getsource(training))


def fields_in(source: str) -> list[Field]:
    """The fields of the TrainConfig that `source` defines. Raises ValueError naming all that lack documentation."""
    (tree,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "TrainConfig")
    following = dict(pairwise(tree.body))
    groups = _groups(source)
    nodes = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    found = [_field(source, node, following.get(node), groups[: node.lineno]) for node in nodes]
    missing = [ast.unparse(node.target) for node, field in zip(nodes, found, strict=True) if field is None]
    if missing:
        needs = "a default, a docstring below it and a '# ---- Group' above it"
        raise ValueError(f"TrainConfig: {', '.join(missing)}: every field needs {needs}")
    return [field for field in found if field]


def _groups(source: str) -> list[str | None]:
    """For each line, the group that begins on it: "Model" of "# ---- Model"."""
    matches = (re.fullmatch(r" +# ---- (.+)", line) for line in source.splitlines())
    return [match and match[1] for match in matches]


def _field(
    source: str, node: ast.AnnAssign, following: ast.stmt | None, groups_above: list[str | None]
) -> Field | None:
    group = next((group for group in reversed(groups_above) if group), None)
    match following:
        case ast.Expr(value=ast.Constant(value=str(words))) if group and node.value:
            default = ast.get_source_segment(source, node.value) or ""  # as written: 3e-4, where unparse says 0.0003
            name, kind = ast.unparse(node.target), ast.unparse(node.annotation)
            return Field(group, name, kind, default, " ".join(words.split()))
    return None


def by_group(fields: list[Field]) -> dict[str, list[Field]]:
    """The fields under their group's name, both in the order of the source."""
    groups: dict[str, list[Field]] = {}
    for field in fields:
        groups.setdefault(field.group, []).append(field)
    return groups


# ---- --help


def help_text() -> str:
    """The page of `python main_training.py --help`."""
    lines = [
        "python main_training.py --name=value ...",
        "",
        "Also: --name value, --name and --noname for True and False; of a flag given twice the last counts.",
    ]
    for group, fields in by_group(documented_fields()).items():
        lines += ["", group]
        for field in fields:
            lines.append(f"  --{field.name}={field.default.strip(chr(34))}  ({field.kind})")
            lines += textwrap.wrap(field.words, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


# ---- configs.md


def tables() -> str:
    """One Markdown table for each group."""
    flags = [_table(group, fields) for group, fields in by_group(documented_fields()).items()]
    return "\n\n".join([*flags, optimizer_table()])


def optimizer_table() -> str:
    """Every optimizer with its defaults."""
    head = "| optimizer | learning_rate | weight_decay | settings; of those with a flag of their own, its name |"
    rows = [
        f"| `{name}` | {rate:g} | {'none' if decay is None else decay} | {', '.join(map(_setting, taken.items()))} |"
        for name, (rate, decay, taken) in OPTIMIZERS.items()
    ]
    return "\n".join(["### Optimizers and their defaults", "", head, "|---|---|---|---|", *rows])


def _setting(item: tuple[str, Any]) -> str:
    name, value = item
    return f"`{FLAGS[name] if name in FLAGS and not isinstance(value, tuple) else name}={value}`"


def _table(group: str, fields: list[Field]) -> str:
    rows = [f"| `{field.name}` | {_code(field.kind)} | `{field.default}` | {cell(field.words)} |" for field in fields]
    return "\n".join([f"### {group}", "", "| flag | type | default | meaning |", "|---|---|---|---|", *rows])


def _code(text: str) -> str:
    return " or ".join(f"`{part}`" for part in text.split(" | "))


def cell(text: str) -> str:
    """Text that stays inside its cell, with placeholders such as <log_dir> shown and not taken for HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
