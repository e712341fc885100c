"""YAML, and the references inside NeMo's and NxD Training's files, read with OmegaConf as these trainers read them.

`3e-4` is a number, a key that is given twice is an error, `???` is a value that the user must give, `${.name}` and
`${trainer.max_steps}` are the values of other keys, `${multiply:a,b}` is computed, and `$HOME` is the environment's.
Our own reader took 88 lines of code for a part of that. The price is 0.12 s of CPU time for a NeMo file of 144 keys
(0.08 s to import OmegaConf, 0.04 s to read), so this module is imported only to read a file.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from pretraining.config.errors import UserError
from pretraining.tools.importing.foreign import MISSING
from pretraining.tools.importing.reading import DEEPEST, LARGEST, check_size, leaves

# multiply and sum are in NeMo's nemo/core/config/hydra_runner.py, the divisions in main.py of NeMo's launcher.
OmegaConf.register_new_resolver("multiply", lambda *factors: math.prod(factors), replace=True)
OmegaConf.register_new_resolver("sum", lambda *terms: sum(terms), replace=True)
OmegaConf.register_new_resolver("add", lambda *terms: sum(terms), replace=True)
OmegaConf.register_new_resolver("subtract", lambda left, right: left - right, replace=True)
OmegaConf.register_new_resolver("divide", lambda left, right: left / right, replace=True)
OmegaConf.register_new_resolver("divide_ceil", lambda left, right: math.ceil(left / right), replace=True)
OmegaConf.register_new_resolver("divide_floor", lambda left, right: math.floor(left / right), replace=True)


# NxD Training's documentation has a `sched` whose keys, `name` first, are not indented: `name` is there twice.
_FLAT_SCHEDULE = re.compile(
    r"^( +)sched: *\n\1name:.*\n?(\1(max_steps|warmup_steps|constant_steps|min_lr):.*\n?)*", re.M
)


def _indent_schedule(match: re.Match[str]) -> str:
    head, *keys = match[0].splitlines(keepends=True)
    return head + "".join(f"  {key}" for key in keys)


def parse_yaml(text: str) -> Any:
    """Return what the YAML holds, references as they are written. Raises ValueError with the line.

    OmegaConf copies what an alias refers to, so the size is checked before.
    """
    try:
        try:
            tree = yaml.load(text, Loader=get_yaml_loader())
        except yaml.constructor.ConstructorError:  # a key twice
            tree = yaml.load(_FLAT_SCHEDULE.sub(_indent_schedule, text), Loader=get_yaml_loader())
        check_size(tree)
        return OmegaConf.to_container(OmegaConf.create(tree)) if isinstance(tree, (dict, list)) else tree
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(" ".join(str(error).split())) from error


_REFERENCE = re.compile(r"\$\{(\.*)([\w.\[\]-]+)\}")


def check_references(tree: Mapping[str, Any]) -> None:
    """Raise UserError if references that refer to references become more text than a configuration has, or too deep."""
    written = {key: str(value) for key, value in leaves(tree)}
    known: dict[str, _Extent] = {}

    def extent(key: str) -> _Extent:
        """Return that of all values below a key; of a loop, which OmegaConf reports, its first turn."""
        below = [key] if key in written else [other for other in written if other.startswith(f"{key}.")]
        for leaf in below:
            if leaf not in known:
                known[leaf] = _Extent(0, 0)
                targets = [extent(_absolute(leaf, *parts)) for parts in _REFERENCE.findall(written[leaf])]
                size = len(written[leaf]) + sum(target.size for target in targets)
                known[leaf] = _Extent(size, 1 + max((target.depth for target in targets), default=0))
        return _Extent(sum(known[leaf].size for leaf in below), max((known[leaf].depth for leaf in below), default=0))

    for key in written:
        try:
            size, depth = extent(key)
        except RecursionError:
            size, depth = 0, DEEPEST + 1
        if depth > DEEPEST:
            raise UserError(f"{key}: references refer to references more than {DEEPEST} deep: write the value")
        if size > LARGEST:
            raise UserError(f"{key}: its references become more than {LARGEST:,} characters: write the value")


class _Extent(NamedTuple):
    """What a value becomes when its references are replaced."""

    size: int  # characters
    depth: int  # references that refer to references


def _absolute(key: str, dots: str, name: str) -> str:
    """Return the key that a reference at `key` names: each dot before the name is a level up, none is the top."""
    return ".".join([*key.split(".")[: -len(dots)], name]) if dots else name


class Leaf(NamedTuple):
    """A key whose references are replaced by their values."""

    key: str
    value: Any  # as written where it cannot be resolved
    error: str = ""


def resolve(tree: Mapping[str, Any]) -> Iterator[Leaf]:
    """Yield the leaves of `tree`, every reference replaced. Raises UserError if the syntax of one is wrong."""
    check_references(tree)
    try:
        root = OmegaConf.create(dict(tree))
    except OmegaConfBaseException as error:
        raise UserError(" ".join(str(error).split())) from error
    yield from _resolve_below(root, "")


def _resolve_below(node: DictConfig, above: str) -> Iterator[Leaf]:
    written: Any = OmegaConf.to_container(node)
    for name in node:
        key = above + str(name)
        try:
            value = MISSING if OmegaConf.is_missing(node, name) else node[name]
            if isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            yield Leaf(key, written[name], str(error).splitlines()[0])
            continue
        if isinstance(value, DictConfig) and value:
            yield from _resolve_below(value, f"{key}.")
        elif isinstance(value, DictConfig):
            yield Leaf(key, {})
        else:
            yield Leaf(key, os.path.expandvars(value) if isinstance(value, str) else value)
