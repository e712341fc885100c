"""References inside a configuration file, as OmegaConf writes them.

`${trainer.max_steps}` is another key's value, `${.name}` counts from the mapping that holds the reference, `${..name}`
from the one around it, `${multiply:a,b}` is NeMo's product, and `$HOME` is the environment's.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from pretraining.config.errors import UserError

MISSING = "???"  # OmegaConf: a value that the user has to give
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")


def resolve(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with every reference replaced. UserError names a reference to nothing, to itself or to a missing value."""
    return _resolve_in(tree, tree, (), ())


def _resolve_in(root: Mapping[str, Any], node: Any, path: tuple[str, ...], seen: tuple[str, ...]) -> Any:
    if isinstance(node, Mapping):
        return {name: _resolve_in(root, value, (*path, name), seen) for name, value in node.items()}
    if isinstance(node, list):
        return [_resolve_in(root, value, path, seen) for value in node]
    if not isinstance(node, str) or "$" not in node:
        return node
    return _resolve_text(root, node, path, seen)


def _resolve_text(root: Mapping[str, Any], text: str, path: tuple[str, ...], seen: tuple[str, ...]) -> Any:
    """Innermost references first. A text that is one reference takes its value's type."""
    here = ".".join(path)
    if here in seen:
        raise UserError(f"{here}={text}: the references go in a circle: {' -> '.join((*seen, here))}")
    while match := _INNERMOST.search(text):
        value = _value(root, match[1].strip(), path, (*seen, here))
        if match[0] == text:
            return value
        text = text[: match.start()] + str(value) + text[match.end() :]
    return os.path.expandvars(text)


def _value(root: Mapping[str, Any], reference: str, path: tuple[str, ...], seen: tuple[str, ...]) -> Any:
    name, colon, arguments = reference.partition(":")
    if colon:
        return _call(name, arguments, ".".join(path))
    target = _absolute(reference, path)
    node: Any = root
    for part in target:
        if not isinstance(node, Mapping) or part not in node:
            raise UserError(f"{'.'.join(path)}=${{{reference}}}: there is no key {'.'.join(target)}")
        node = node[part]
    if node == MISSING:
        raise UserError(f"{'.'.join(path)}=${{{reference}}}: {'.'.join(target)}=??? has to be given first")
    return _resolve_in(root, node, target, seen)


def _absolute(reference: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """One leading dot is the mapping that holds the key, each further dot the one around it."""
    bare = reference.lstrip(".")
    dots = len(reference) - len(bare)
    above = path[: len(path) - dots] if dots else ()
    return (*above, *bare.split("."))


def _call(name: str, arguments: str, here: str) -> Any:
    if name not in _RESOLVERS:
        raise UserError(f"{here}=${{{name}:{arguments}}}: no such resolver; known are {', '.join(_RESOLVERS)}")
    try:
        return _RESOLVERS[name]([part.strip() for part in arguments.split(",")])
    except (ValueError, KeyError) as error:
        raise UserError(f"{here}=${{{name}:{arguments}}}: cannot be computed: {error}") from error


def _environment(arguments: list[str]) -> str:
    return os.environ.get(*arguments) or os.environ[arguments[0]]


_RESOLVERS: dict[str, Callable[[list[str]], Any]] = {
    "multiply": lambda arguments: math.prod(int(part) for part in arguments),
    "oc.env": _environment,
}
