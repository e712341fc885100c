"""From the files that are named to a Source: which trainer they are for, their keys, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretraining.config.errors import UserError
from pretraining.importing import interpolation, nemo, neox, nxdt
from pretraining.importing.reading import leaves, read_file
from pretraining.importing.rules import Source, Table

TABLES: dict[str, Table] = {"nxdt": nxdt.TABLE, "nemo": nemo.TABLE, "neox": neox.TABLE}


class Opened:
    """A foreign configuration as it was written, and as it is read."""

    def __init__(self, kind: str, raw: Mapping[str, Any], source: Source) -> None:
        self.kind = kind
        self.raw = raw  # dotted key -> value before references were replaced
        self.source = source
        self.table = TABLES[kind]


def open_source(paths: Sequence[str], asked: str, flags: Mapping[str, object]) -> Opened:
    """The configuration of `paths`. asked: "nxdt", "nemo", "neox" or "auto". UserError says what cannot be read."""
    trees = [read_file(Path(path)) for path in paths]
    kind = kind_of(trees[0], paths[0]) if asked == "auto" else asked
    if kind == "neox":
        return _open_neox(_merge(trees, paths), flags)
    if len(trees) > 1:
        raise UserError(f"--import_config={','.join(paths)}: several files are one configuration in GPT-NeoX alone")
    raw = dict(leaves(trees[0]))
    resolved = dict(leaves(interpolation.resolve(trees[0])))
    table = TABLES[kind]
    return Opened(kind, raw, Source(resolved, table.absent, flags, Path(paths[0]).parent))


def kind_of(tree: Mapping[str, Any], path: str) -> str:
    """Which trainer's file this is, by the keys that only one of them has."""
    model = tree.get("model")
    if "distributed_strategy" in tree:
        return "nxdt"
    if isinstance(model, dict) and "micro_batch_size" in model:
        return "nemo"
    if "num_layers" in {str(key).replace("-", "_") for key in tree}:
        return "neox"
    known = "distributed_strategy (nxdt), model.micro_batch_size (nemo), num_layers at the top (neox)"
    raise UserError(f"{path}: whose file is this? None of {known} is there; name it with --import_format")


def _open_neox(raw: dict[str, Any], flags: Mapping[str, object]) -> Opened:
    era, told = neox.era_of(raw, str(flags.get("neox_era", "auto")))
    return Opened("neox", raw, Source(raw, TABLES["neox"].absent, flags, facts={"era": era, "told": told}))


def _merge(trees: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> dict[str, Any]:
    """The keys of all files with underscores for dashes; one that stands twice is an error."""
    merged: dict[str, Any] = {}
    where: dict[str, str] = {}
    for tree, path in zip(trees, paths, strict=True):
        for name, value in leaves(_underscored(tree, path)):
            if name in merged:
                raise UserError(f"{name}: stands in {where[name]} and in {path}; leave one out")
            merged[name], where[name] = value, path
    return merged


def _underscored(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in tree.items():
        plain = name.replace("-", "_")
        if plain in renamed:
            raise UserError(f"{path}: {name}: stands with a dash and with an underscore; leave one out")
        renamed[plain] = _underscored(value, path) if isinstance(value, dict) else value
    return renamed
