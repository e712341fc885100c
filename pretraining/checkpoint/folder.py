"""A folder of checkpoints: which are committed, which is the newest, which to remove.

A checkpoint is a folder step_N with the marker; everything else is neither counted nor touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pretraining.checkpoint.files import read_json
from pretraining.checkpoint.manifest import Checkpoint, Facts, is_committed, open_checkpoint
from pretraining.checkpoint.peers import Peers
from pretraining.config.errors import UserError
from pretraining.storage import CHECKPOINT_FORMATS, STEP, Location, is_remote, location, store_of

CHECKPOINTS = "checkpoints"  # in a run's folder, unless ckpt_save_path is set
RUN_CONFIG = "config.json"  # of a run: its effective configuration
ALLOW_REMOTE = "contact the object storage that the run's configuration names"  # help of the flag


class CheckpointList(NamedTuple):
    """The checkpoints of a folder."""

    committed: list[Location]  # newest first
    uncommitted: list[Location]  # step_N without a marker, which no save of ours leaves behind


class Place(Protocol):
    """A place of checkpoints besides ckpt_save_path, whose checkpoints are saved between those there."""

    def committed(self) -> list[Location]:
        """Return the checkpoints that this host has, newest first."""

    def open(self, peers: Peers) -> None:
        """Lock the folder. Collective over `peers`, as all that follow are, except `due`."""

    def due(self, step: int) -> bool:
        """Return whether the state after `step` updates is to be saved here."""

    def common(self) -> list[Location]:
        """Return the checkpoints that every host has, newest first."""

    def check(self, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        """Raise UnreadableError if one of these checkpoints lacks what this process's `state` takes from it."""

    def plan_save(self, state: Mapping[str, Any], facts: Facts, peers: Peers, **options: Any) -> Any:
        """Return the checkpoint.store.PendingSave of `state`. options: see there."""

    def forget_after(self, step: int) -> None:
        """Remove checkpoints of later steps than the run continues from."""

    def retain(self) -> None:
        """Remove checkpoints that are not to be kept."""

    def release(self) -> None:
        """Release the lock."""


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
    keep_steps(folder, lambda steps: steps[:count])


def keep_steps(folder: Location, choose: Callable[[Sequence[int]], Collection[int]]) -> None:
    """Remove committed checkpoints, oldest first, but the newest and those that `choose` returns of their steps, newest
    first."""
    steps = {step_of(path): path for path in find_checkpoints(folder).committed}
    kept = {*list(steps)[:1], *choose(list(steps))}
    for step in sorted(steps.keys() - kept):
        store_of(steps[step]).remove_folder(steps[step])


def sweep(folder: Location) -> None:
    """Remove what interrupted saves and removals have left. The caller holds the folder's lock."""
    store = store_of(folder)
    for path in store.left_over(folder):
        store.remove_folder(path)


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


def open_any_checkpoint(path: Location, allow_remote: bool = True) -> Checkpoint:
    """Open a folder in a format that an extension reads, a step_N folder, or the newest checkpoint of a run."""
    for form in CHECKPOINT_FORMATS:
        if form.recognizes(path):
            checkpoint: Checkpoint = form.open(path)
            return checkpoint
    return open_checkpoint(newest_checkpoint(path, allow_remote))
