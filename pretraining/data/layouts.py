"""Folders that hold several splits: what prepare.py writes, and a DatasetDict of Hugging Face's datasets.

Does not import numpy: checks.py asks which splits a folder has before anything else is loaded.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from pretraining.config.errors import UserError
from pretraining.storage import Location

PLAN = "plan.json"  # what prepare.py writes into its output first
RECORDS = ".parts"  # its folder of one record per finished shard
FLAGS = "flags.txt"  # what it writes last
DESCRIPTION = "meta.json"  # what it writes next to the shards
DATASET_DICT = "dataset_dict.json"  # what DatasetDict.save_to_disk writes next to the folders of its splits
DATASET_STATE = "state.json"  # what Dataset.save_to_disk writes next to its shards
# Split -> the folders it may have; the first one that exists is taken. "valid" is prepare.py's.
_FOLDERS = {"train": ("train",), "valid": ("valid", "validation", "dev"), "test": ("test",)}


class SplitFolders(NamedTuple):
    """A folder that holds several splits."""

    kind: str
    folders: dict[str, Location]  # split -> its folder

    def describe(self) -> str:
        """Return a line that says where every split is taken from."""
        parts = ", ".join(f"{split} from {folder.name}/" for split, folder in self.folders.items())
        return f"{self.folders['train'].parent} is {self.kind}: {parts}"


def split_folders(folder: Location) -> SplitFolders | None:
    """Return the splits of a folder, None if it holds the data of one split.

    UserError if the folder is not complete, or has no training split.
    """
    if (folder / PLAN).is_file() and (folder / RECORDS).is_dir():
        if not (folder / FLAGS).is_file():
            raise UserError(f"{folder}: its preparation is not complete: run the same prepare command again")
        kind, names = "a prepared folder", [name for name in ("train", "valid") if (folder / name).is_dir()]
    elif (folder / DATASET_DICT).is_file():
        splits = read_dataset_json(folder / DATASET_DICT).get("splits")
        kind, names = "a DatasetDict", splits if isinstance(splits, list) else []
    else:
        return None
    first = {split: next((name for name in choices if name in names), "") for split, choices in _FOLDERS.items()}
    folders = {split: folder / name for split, name in first.items() if name}
    if "train" not in folders:
        listed = ", ".join(map(str, names)) or "none"
        reason = f"{kind} without a train split, it has {listed}"
        raise UserError(f"{folder}: {reason}: give the folder of one, {folder}/...")
    return SplitFolders(kind, folders)


def read_dataset_json(path: Location) -> dict[str, Any]:
    """Return the object in a JSON file. UserError if it is damaged."""
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}): write the dataset again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object: write the dataset again")
    return content
