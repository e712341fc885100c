"""A folder of checkpoints: which are committed, which is the newest, which to remove.

A checkpoint is a folder step_N with the marker; everything else is neither counted nor touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pretraining.checkpoint.manifest import Checkpoint, Facts, is_committed
from pretraining.checkpoint.peers import Peers
from pretraining.storage import STEP, Location, store_of

CHECKPOINTS = "checkpoints"  # in a run's folder, unless ckpt_save_path is set


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
    paths = folder.iterdir() if folder.is_dir() else ()
    steps = [path for path in paths if path.is_dir() and STEP.fullmatch(path.name)]
    committed = {path: is_committed(path) for path in newest_first(steps)}
    return CheckpointList([p for p in committed if committed[p]], [p for p in committed if not committed[p]])


def step_of(path: Location) -> int:
    """Return the step of a checkpoint's folder."""
    return int(path.name.removeprefix("step_"))


def newest_first(*lists: Iterable[Location]) -> list[Location]:
    """Return the checkpoints of several folders, the newest first; of the same step, those of the first list."""
    return sorted((path for paths in lists for path in paths), key=step_of, reverse=True)


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
