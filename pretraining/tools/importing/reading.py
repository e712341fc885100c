"""Read configuration files as nested dictionaries: YAML, JSON, TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pretraining.config.errors import UserError
from pretraining.extensions.packages import extra_packages

# What a file may hold, far above any configuration: NeMo's own example files have 12 KB, 250 values and 4 levels.
DEEPEST = 50  # levels of mappings and lists
MOST = 100_000  # values
LARGEST = 2**20  # bytes; PyYAML reads 0.1 MB a second
LONGEST = 100  # digits of a whole number
TOO_DEEP = f"mappings or lists are nested more than {DEEPEST} deep"
TOO_MANY = f"it holds more than {MOST:,} values"
TOO_LONG = f"a whole number has more than {LONGEST} digits"


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a .json, .toml or (anything else) YAML file. Raises UserError that names file and line."""
    if path.exists() and not path.is_file():  # a named pipe would be read for ever
        raise UserError(f"{path}: cannot be read: it is no file")
    is_named = path.suffix in (".json", ".toml", ".yaml", ".yml")
    hint = "" if is_named else " as YAML (the name of a TOML file ends in .toml, of a JSON file in .json)"
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, and a configuration at most {LARGEST:,}")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            tree = json.loads(text, object_pairs_hook=_refuse_repeated)
        elif path.suffix == ".toml":
            tree = tomllib.loads(text)
        else:
            with extra_packages(f"a YAML file ({path})"):
                from pretraining.tools.importing.references import parse_yaml  # see there for the time that it takes

            tree = parse_yaml(text)
        check_size(tree)
    except RecursionError:
        raise UserError(f"{path}: cannot be read: {TOO_DEEP}") from None
    except (OSError, ValueError) as error:  # a ValueError from JSON, TOML, Unicode, YAML or a repeated key
        reason = TOO_LONG if "int_max_str_digits" in str(error) else error  # Python's limit, 4,300 digits
        raise UserError(f"{path}: cannot be read{hint}: {reason}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: has no keys{hint}; it must be a mapping of names to values")
    return {str(name): value for name, value in tree.items()}


def check_size(tree: Any) -> None:
    """Raise ValueError if a tree is deeper or larger than functions that walk it can follow, or has a longer number.

    What several aliases of YAML refer to counts as often.
    """
    nodes, count = [tree], 0
    for _ in range(DEEPEST + 1):
        if any(type(node) is int and abs(node) >= 10**LONGEST for node in nodes):
            raise ValueError(TOO_LONG)
        inner = [node.values() if isinstance(node, dict) else node for node in nodes if isinstance(node, (dict, list))]
        count += sum(map(len, inner))
        if count > MOST:
            raise ValueError(TOO_MANY)
        nodes = [child for children in inner for child in children]
    if nodes:
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
