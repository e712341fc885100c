"""Open the files of another trainer: recognise the format, and read the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretraining.config.errors import UserError
from pretraining.importing import nemo, neox, nxdt
from pretraining.importing.foreign import ForeignConfig
from pretraining.importing.mappings import Format
from pretraining.importing.reading import leaves, read_file

FORMATS: dict[str, Format] = {format.name: format for format in (nxdt.FORMAT, nemo.FORMAT, neox.FORMAT)}


def open_foreign(paths: Sequence[str], asked: str, flags: Mapping[str, object]) -> tuple[Format, ForeignConfig]:
    """Read the configuration in `paths`. asked: --import_format. Raises UserError if it cannot be read."""
    trees = [read_file(Path(path)) for path in paths]
    name = format_of(trees[0], paths[0]) if asked == "auto" else asked
    if name == "neox":
        return FORMATS[name], _open_neox(trees, paths, flags)
    if len(trees) > 1:
        raise UserError(f"--import_config={','.join(paths)}: several files are one configuration in GPT-NeoX alone")
    from pretraining.importing.references import resolve  # see there for the time that it takes

    resolved = list(resolve(trees[0]))
    return FORMATS[name], ForeignConfig(
        values={leaf.key: leaf.value for leaf in resolved},
        defaults=FORMATS[name].defaults,
        flags=flags,
        written=dict(leaves(trees[0])),
        errors={leaf.key: leaf.error for leaf in resolved if leaf.error},
        files={leaf.key: Path(paths[0]) for leaf in resolved},
    )


def format_of(tree: Mapping[str, Any], path: str) -> str:
    """Return the name of the format, by the keys that only one of them has."""
    model = tree.get("model")
    if "distributed_strategy" in tree:
        return "nxdt"
    if isinstance(model, dict) and "micro_batch_size" in model:
        return "nemo"
    if "num_layers" in {str(key).replace("-", "_") for key in tree}:
        return "neox"
    keys = "distributed_strategy (nxdt), model.micro_batch_size (nemo) or a top-level num_layers (neox)"
    raise UserError(f"{path}: the format is unknown because it has no {keys}; set --import_format")


def _open_neox(trees: Sequence[Mapping[str, Any]], paths: Sequence[str], flags: Mapping[str, object]) -> ForeignConfig:
    """Merge the keys of all files, with underscores for dashes; a key that is given twice is an error."""
    values: dict[str, Any] = {}
    files: dict[str, Path] = {}
    for tree, path in zip(trees, paths, strict=True):
        for name, value in leaves(_underscored(tree, path)):
            if name in values:
                raise UserError(f"{name}: is both in {files[name]} and in {path}; leave one out")
            values[name], files[name] = value, Path(path)
    era, reason = neox.era_of(values, str(flags.get("neox_era", "auto")))
    return ForeignConfig(values, neox.FORMAT.defaults, flags, written=values, files=files, era=era, era_reason=reason)


def _underscored(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in tree.items():
        plain = name.replace("-", "_")
        if plain in renamed:
            raise UserError(f"{path}: {name} is there with a dash and with an underscore; leave one out")
        renamed[plain] = _underscored(value, path) if isinstance(value, dict) else value
    return renamed
