"""Configuration files as nested dictionaries: YAML with the numbers of YAML 1.2, JSON, TOML.

PyYAML reads `3e-4` as text, because YAML 1.1 wants a dot in a float; OmegaConf and the trainers that use it read a
number. A key that stands twice is an error: which of the two counts is not for us to guess.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pretraining.config.errors import UserError

# YAML 1.2, chapter 10.3.2: a float needs a dot or an exponent, otherwise it is a whole number.
FLOAT = re.compile(
    r"[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


def read_file(path: Path) -> dict[str, Any]:
    """The mapping that a .json, .toml or (anything else) YAML file holds. UserError names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = _parse(text, path.suffix)
    except (OSError, ValueError) as error:  # json, toml, unicode and repeated keys; YAML's own errors are made one
        raise UserError(f"{path}: cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds no keys; want a mapping of names to values")
    return tree


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".json":
        return json.loads(text, object_pairs_hook=_unrepeated)
    if suffix == ".toml":
        return tomllib.loads(text)
    return _parse_yaml(text)


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


@cache
def _loader() -> Any:
    """PyYAML's safe loader with YAML 1.2's floats, refusing a key that stands twice in one mapping."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers.items()
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith((":float", ":timestamp"))]
        for first, pairs in resolvers
    }
    loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{FLOAT.pattern})$"), list("-+0123456789."))
    loader.add_constructor("tag:yaml.org,2002:map", _mapping)
    return loader


def _mapping(loader: Any, node: Any) -> dict[str, Any]:
    loader.flatten_mapping(node)
    return _unrepeated(
        [(loader.construct_object(k, deep=True), loader.construct_object(v, deep=True)) for k, v in node.value]
    )


def _unrepeated(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    names = [str(name) for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{', '.join(repeated)} stands more than once")
    return {name: value for name, (_, value) in zip(names, pairs, strict=True)}


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is no mapping with keys of its own. A list is one value."""
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value
