"""A folder of checkpoints: which are committed, which is the newest, which to remove.

A checkpoint is a folder step_N with the marker; everything else is neither counted nor touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from pretraining.checkpoint.files import DAMAGED, DELETED, MARKER, PARTIAL, read_json, remove_folder
from pretraining.checkpoint.manifest import is_committed
from pretraining.config.errors import UserError
from pretraining.storage import Location, ObjectPath, is_remote, location

CHECKPOINTS = "checkpoints"  # in a run's folder, unless ckpt_save_path is set
RUN_CONFIG = "config.json"  # of a run: its effective configuration
ALLOW_REMOTE = "contact the object storage that the run's configuration names"  # help of the flag
STEP = re.compile(r"step_(0|[1-9][0-9]*)")


class CheckpointList(NamedTuple):
    """The checkpoints of a folder."""

    committed: list[Location]  # newest first
    uncommitted: list[Location]  # step_N without a marker, which no save of ours leaves behind


def find_checkpoints(folder: Location) -> CheckpointList:
    """Return the checkpoints in `folder`, newest first; none if there is no such folder."""
    steps = sorted(((int(match[1]), path) for path, match in _matches(folder)), reverse=True)
    committed = {path: is_committed(path) for _, path in steps}
    return CheckpointList([p for p in committed if committed[p]], [p for p in committed if not committed[p]])


def step_of(path: Location) -> int:
    """Return the step of a checkpoint's folder."""
    return int(path.name.removeprefix("step_"))


def newest_first(*lists: Iterable[Location]) -> list[Location]:
    """Return the checkpoints of several folders, the newest first; of the same step, those of the first list."""
    return sorted((path for paths in lists for path in paths), key=step_of, reverse=True)


def _matches(folder: Location) -> list[tuple[Location, re.Match[str]]]:
    if not folder.is_dir():
        return []
    named = [(path, STEP.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir()]
    return [(path, match) for path, match in named if match]


def keep_newest(folder: Location, count: int) -> None:
    """Remove all but the `count` newest committed checkpoints, oldest first."""
    assert count >= 1
    for path in reversed(find_checkpoints(folder).committed[count:]):
        remove_folder(path)


def sweep(folder: Location) -> None:
    """Remove what interrupted saves and removals have left. The caller holds the folder's lock."""
    if isinstance(folder, ObjectPath):
        for path in find_checkpoints(folder).uncommitted:
            if not (path / (MARKER + DAMAGED)).is_file():
                remove_folder(path)
        return
    for path in folder.glob("step_*"):
        if path.suffix in (PARTIAL, DELETED) and STEP.fullmatch(path.stem) and path.is_dir():
            remove_folder(path)


def refuse_remote(name: str, value: str, owner: Location) -> None:
    """Raise UserError if a configuration in `owner`, which may be anyone's, names a path in object storage."""
    if is_remote(value) and not is_remote(owner):
        raise UserError(f"{owner}: its configuration has {name}={value}; --allow_remote contacts that storage")


def newest_checkpoint(path: Location, allow_remote: bool = True) -> Location:
    """Return the checkpoint at `path`: a step_N folder itself, or the newest of a run or of a folder of checkpoints.

    A run has its checkpoints where its config.json says, or in `checkpoints`. allow_remote: whether that may be object
    storage, if `path` is not. Raises UserError if there is none.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such folder")
    if is_committed(path):
        return path
    folders = [path / CHECKPOINTS, path]
    if (path / RUN_CONFIG).is_file() and (named := read_json(path / RUN_CONFIG).get("ckpt_save_path")):
        if not isinstance(named, str):
            raise UserError(f"{path / RUN_CONFIG}: ckpt_save_path={named} is no path")
        if not allow_remote:
            refuse_remote("ckpt_save_path", named, path)
        folders.insert(0, location(named))
    for folder in folders:
        if committed := find_checkpoints(folder).committed:
            return committed[0]
    places = ", ".join(map(str, folders))
    raise UserError(f"{path}: holds no committed checkpoint (a step_N folder with its marker); searched {places}")
