"""Folders in which other tools keep several splits, or several versions, of the same documents next to each other.

All shards of a folder are one dataset here, so that a run would train on its test data, or twice on each document.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pretraining.config.errors import UserError
from pretraining.config.grammar import comma_separated
from pretraining.config.training import TrainConfig
from pretraining.data.layouts import DATASET_STATE, split_folders
from pretraining.storage import is_remote

FLAGS = {"data_path": "datasets", "valid_data_path": "valid_datasets", "test_data_path": ""}
ENDINGS = (".arrow", ".parquet", ".idx")
TRAIN, HELD_OUT = "train", ("validation", "valid", "val", "dev", "eval", "test")
# train-00000-of-00002.parquet of the hub, NAME-train.arrow of the cache, or train/: the split is a word of the name
_SPLIT = re.compile(rf"(?<![a-z0-9])({'|'.join((TRAIN, *HELD_OUT))})(?![a-z0-9])")
_CACHE = re.compile(r"(cache-[0-9a-f]{16})(_\d+_of_\d+)?\.arrow")  # what Dataset.map and filter write


def check_splits(config: TrainConfig) -> None:
    """Raise UserError if shards of one dataset belong to several splits, or repeat each other; local folders only."""
    for flag, datasets in FLAGS.items():
        path, names = getattr(config, flag), getattr(config, datasets) if datasets else ""
        if path and not config.use_dummy_dataset and not is_remote(path):
            for root in _datasets(Path(path), names):
                _check_folders(root, flag)


def _datasets(root: Path, names: str) -> Iterator[Path]:
    """Yield the folders of which all shards are read."""
    for folder in [root / name for name in comma_separated(names)] or [root]:
        if (splits := _splits(folder)) is not None:
            yield from [folder / split for split in splits] or [folder]


def _splits(folder: Path) -> list[str] | None:
    """Return the folders of the splits that a folder holds; none if it is no prepared folder and no DatasetDict.

    None: it is one that cannot be read, such as one whose preparation is not complete.
    """
    with suppress(UserError):  # which opening the data raises, too
        layout = split_folders(folder)
        return [split.name for split in layout.folders.values()] if layout else []
    return None


def _check_folders(root: Path, flag: str) -> None:
    is_mixture = False
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        shards = sorted(name for name in files if name.endswith(ENDINGS) and not name.startswith((".", "_")))
        is_mixture = not shards if folder == str(root) else is_mixture
        if is_mixture and Path(folder).parent == root and (splits := _splits(Path(folder))) != []:
            folders[:] = splits or []  # a dataset of a mixture, which takes one of them
        else:
            _check_names(f"--{flag}={folder}", folders)
        if DATASET_STATE not in files:  # which lists those to read
            _check_names(f"--{flag}={folder}", shards)
            _check_caches(f"--{flag}={folder}", [name for name in shards if name.endswith(".arrow")])


def _check_names(subject: str, names: list[str]) -> None:
    """Raise UserError if two names differ in their split alone, and one is of the training."""
    splits = defaultdict[str, dict[str, str]](dict)
    for name in names:
        for match in _SPLIT.finditer(name):
            others = re.sub(r"\d+", "0", f"{name[: match.start()]}*{name[match.end() :]}")
            splits[others].setdefault(match[1], name)
    for found in splits.values():
        if TRAIN in found and len(found) > 1:
            other = next(name for split, name in found.items() if split != TRAIN)
            raise UserError(
                f"{subject}: {found[TRAIN]} and {other} are of different splits, which would be one here: give each "
                "split a folder of its own, and name it"
            )


def _check_caches(subject: str, names: list[str]) -> None:
    """Raise UserError if there is a cache next to the shards that it was made from, or next to another one."""
    versions: dict[str, str] = {}
    for name in names:
        cache = _CACHE.fullmatch(name)
        versions.setdefault(cache[1] if cache else "", name)
    if len(versions) > 1:
        first, second = list(versions.values())[:2]
        raise UserError(
            f"{subject}: {first} and {second} have the same documents, before and after a map or filter of Hugging "
            "Face's datasets: give a folder that save_to_disk() wrote"
        )
