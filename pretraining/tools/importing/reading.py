"""Read configuration files as nested dictionaries: YAML, JSON, TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pretraining.config.errors import UserError

DEEPEST = 50  # levels of mappings and lists; NeMo's own example files have 4
TOO_DEEP = f"mappings or lists are nested more than {DEEPEST} deep"


def read_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a .json, .toml or (anything else) YAML file. Raises UserError that names file and line."""
    if path.exists() and not path.is_file():  # a named pipe would be read for ever
        raise UserError(f"{path}: cannot be read: it is no file")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            tree = json.loads(text, object_pairs_hook=_refuse_repeated)
        elif path.suffix == ".toml":
            tree = tomllib.loads(text)
        else:
            from pretraining.tools.importing.references import parse_yaml  # see there for the time that it takes

            tree = parse_yaml(text)
        _refuse_depth(tree)
    except RecursionError:
        raise UserError(f"{path}: cannot be read: {TOO_DEEP}") from None
    except (OSError, ValueError) as error:  # a ValueError from JSON, TOML, Unicode, YAML or a repeated key
        raise UserError(f"{path}: cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: has no keys; it must be a mapping of names to values")
    return {str(name): value for name, value in tree.items()}


def _refuse_depth(tree: Any) -> None:
    """Raise ValueError if mappings and lists are nested deeper than functions that walk them can follow."""
    nodes = [tree]
    for _ in range(DEEPEST):
        inner = [node.values() if isinstance(node, dict) else node for node in nodes if isinstance(node, (dict, list))]
        nodes = [child for children in inner for child in children]
    if any(isinstance(node, (dict, list)) for node in nodes):
        raise ValueError(TOO_DEEP)


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"found duplicate key {', '.join(repeated)}")
    return dict(pairs)


def leaves(tree: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that is no mapping with keys of its own. A list is one value."""
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value
