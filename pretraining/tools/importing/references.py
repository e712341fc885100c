"""YAML, and the references inside NeMo's and NxD Training's files, read with OmegaConf as these trainers read them.

`3e-4` is a number, a key that is given twice is an error, `???` is a value that the user must give, `${.name}` and
`${trainer.max_steps}` are the values of other keys, `${multiply:a,b}` is computed, and `$HOME` is the environment's.
Our own reader took 88 lines of code for a part of that. The price is 0.12 s of CPU time for a NeMo file of 144 keys
(0.08 s to import OmegaConf, 0.04 s to read), so this module is imported only to read a file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pretraining.config.errors import UserError
from pretraining.tools.importing.foreign import MISSING

# multiply and sum are in NeMo's nemo/core/config/hydra_runner.py, the divisions in main.py of NeMo's launcher.
OmegaConf.register_new_resolver("multiply", lambda *factors: math.prod(factors), replace=True)
OmegaConf.register_new_resolver("sum", lambda *terms: sum(terms), replace=True)
OmegaConf.register_new_resolver("add", lambda *terms: sum(terms), replace=True)
OmegaConf.register_new_resolver("subtract", lambda left, right: left - right, replace=True)
OmegaConf.register_new_resolver("divide", lambda left, right: left / right, replace=True)
OmegaConf.register_new_resolver("divide_ceil", lambda left, right: math.ceil(left / right), replace=True)
OmegaConf.register_new_resolver("divide_floor", lambda left, right: math.floor(left / right), replace=True)


def parse_yaml(text: str) -> Any:
    """Return what the YAML holds, references as they are written. Raises ValueError with the line."""
    try:
        return OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(" ".join(str(error).split())) from error


class Leaf(NamedTuple):
    """A key whose references are replaced by their values."""

    key: str
    value: Any  # as written where it cannot be resolved
    error: str = ""


def resolve(tree: Mapping[str, Any]) -> Iterator[Leaf]:
    """Yield the leaves of `tree`, every reference replaced. Raises UserError if the syntax of one is wrong."""
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
