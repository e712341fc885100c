"""Open the files of another trainer: recognise the format, and read the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretraining.config.errors import UserError
from pretraining.extensions.packages import extra_packages
from pretraining.tools.importing import nemo, neox, nxdt
from pretraining.tools.importing.foreign import ForeignConfig
from pretraining.tools.importing.mappings import TrainerFormat
from pretraining.tools.importing.model_file import is_description
from pretraining.tools.importing.reading import leaves, read_mapping

FORMATS: dict[str, TrainerFormat] = {format.name: format for format in (nxdt.FORMAT, nemo.FORMAT, neox.FORMAT)}
STAGE = "training"  # of NeMo's launcher


def open_foreign(
    paths: Sequence[str], asked: str, overrides: Sequence[str], flags: Mapping[str, object]
) -> tuple[TrainerFormat, ForeignConfig]:
    """Read the configuration in `paths`. asked: --import_format. overrides: "key=value" of keys with another value.

    Raises UserError if it cannot be read.
    """
    trees = [read_mapping(Path(path)) for path in paths]
    for override in overrides:
        _put(trees, override)
    name = format_of(trees, paths) if asked == "auto" else asked
    if name == "neox":
        return FORMATS[name], _open_neox(trees, paths, flags)
    if len(trees) > 1:
        raise UserError(f"--import_config={','.join(paths)}: several files are one configuration in GPT-NeoX alone")
    return FORMATS[name], _open_nemo(trees[0], Path(paths[0]), FORMATS[name], flags)


def _put(trees: Sequence[dict[str, Any]], override: str) -> None:
    """Set a dotted key to a value, which is read as YAML, in the file that has the key, or the last one."""
    from pretraining.tools.importing.references import parse_yaml

    key, _, text = override.partition("=")
    try:
        value = parse_yaml(f"value: {text}")["value"]
    except ValueError as error:
        raise UserError(f"{override}: is no value of YAML: {error}") from error
    having = (tree for tree in trees if key in {written.replace("-", "_") for written, _ in leaves(tree)})
    tree = next(having, trees[-1])
    *above, name = _below_stage(key.split("."), tree)
    for part in above:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[name] = value


def _below_stage(names: list[str], tree: Mapping[str, Any]) -> list[str]:
    """Return the names of a key as a file of NeMo's launcher has them, composed or not."""
    if names[0] == STAGE and "run" in tree:
        return names[1:]
    is_composed = isinstance(tree.get(STAGE), dict)
    return [STAGE, *names] if is_composed and names[0] not in tree and names[0] in tree[STAGE] else names


def _open_nemo(tree: dict[str, Any], path: Path, format_: TrainerFormat, flags: Mapping[str, object]) -> ForeignConfig:
    """Replace the references. NeMo's launcher has the training's keys under "training", or in a file of their own."""
    with extra_packages(f"a file of {format_.title} ({path})"):
        from pretraining.tools.importing.references import resolve  # see there for the time that it takes

    is_composed = isinstance(tree.get(STAGE), dict)
    from_launcher = is_composed or "run" in tree
    others: list[Any] = []
    resolved = list(resolve({**tree, STAGE: tree} if from_launcher and not is_composed else tree))
    written = dict(leaves(tree))
    if from_launcher:
        written = {key.removeprefix(f"{STAGE}."): value for key, value in written.items()}
        stage = [leaf for leaf in resolved if leaf.key.startswith(f"{STAGE}.")]
        others = [leaf for leaf in resolved if is_composed and leaf not in stage]
        resolved = [leaf._replace(key=leaf.key.removeprefix(f"{STAGE}.")) for leaf in stage] + others
    return ForeignConfig(
        values={leaf.key: leaf.value for leaf in resolved},
        defaults=format_.defaults,
        flags=flags,
        written=written,
        errors={leaf.key: leaf.error for leaf in resolved if leaf.error},
        from_launcher=from_launcher,
        other_stages={leaf.key for leaf in others},
        files={leaf.key: path for leaf in resolved},
    )


def format_of(trees: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> str:
    """Return the name of the format, by the keys that only one of them has, in any of the files."""
    for tree in trees:
        if name := format_by_own_keys(tree):
            return name
        if "num_layers" in {str(key).replace("-", "_") for key in tree}:
            return "neox"
        if is_description(tree):
            raise UserError(f"{','.join(paths)}: is Hugging Face's description of a model: use --model_config_path")
    keys = "distributed_strategy (nxdt), model.micro_batch_size (nemo) or a top-level num_layers (neox)"
    remedy = "set --import_format, or give flags for the file of another trainer: --help=NAME finds them by its names"
    raise UserError(f"{','.join(paths)}: the format is unknown because there is no {keys}; {remedy}")


def format_by_own_keys(tree: Mapping[str, Any]) -> str:
    """Return the name of a format by keys that no configuration of this recipe has; "" without them."""
    stage = tree.get(STAGE)
    model = tree.get("model") or (stage.get("model") if isinstance(stage, dict) else None)
    if "distributed_strategy" in tree:
        return "nxdt"
    if isinstance(model, dict) and "micro_batch_size" in model:
        return "nemo"
    names = {str(key).replace("-", "_") for key in tree}
    has_deepspeeds = names >= {"train_micro_batch_size_per_gpu", "num_layers"}  # the first is in DeepSpeed's own files
    return "neox" if has_deepspeeds or "pipe_parallel_size" in names else ""


def _open_neox(trees: Sequence[Mapping[str, Any]], paths: Sequence[str], flags: Mapping[str, object]) -> ForeignConfig:
    """Merge the keys of all files, with underscores for dashes.

    As in NeoX, one spelling in two files is an error, and of two spellings the later file's wins, with a warning.
    """
    values: dict[str, Any] = {}
    files: dict[str, Path] = {}
    spellings: dict[str, str] = {}
    replaced: dict[str, str] = {}
    for tree, path in zip(trees, paths, strict=True):
        for written, value in leaves(tree):
            name = written.replace("-", "_")
            if spellings.get(name) == written:
                raise UserError(f"{written}: is both in {files[name]} and in {path}; leave one out")
            if name in values and values[name] != value:
                replaced[f"{spellings[name]}={values[name]} in {files[name]}"] = name
            values[name], files[name], spellings[name] = value, Path(path), written
    era, reason = neox.era_of(values, str(flags.get("neox_era", "auto")))
    return ForeignConfig(
        values,
        neox.FORMAT.defaults,
        flags,
        written=values,
        files=files,
        replaced=replaced,
        era=era,
        era_reason=reason,
    )
