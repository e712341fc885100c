"""Start a run from its own newest checkpoint, or from initial weights.

Whether a checkpoint may be loaded is decided from JSON alone, before any tensor is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pretraining.checkpoint.compatibility import Change, check_resume, describe_rate_change
from pretraining.checkpoint.files import UnreadableError
from pretraining.checkpoint.folder import CHECKPOINTS, Place, find_checkpoints, newest_first
from pretraining.checkpoint.manifest import Checkpoint, Facts, open_checkpoint
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.store import is_weight, load
from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.parallel.engine import OPTIONAL, TrainingState
from pretraining.storage import Location, location


def check_starting_point(config: TrainConfig, log_dir: Path, shapes: Mapping[str, tuple[int, ...]]) -> Facts | None:
    """Return the facts of the checkpoint that this run continues from, if there is one, before any device is opened.

    Only JSON is read, and nothing is written. `restore` takes an earlier checkpoint if the tensors turn out to be
    corrupt. Raises UserError if `resume` forbids it, ckpt_load_path has no checkpoint, or a checkpoint does not match
    the configuration and the parameters' `shapes`.
    """
    folder = checkpoint_folder(config, log_dir)
    local = [path for place in config.checkpoint_places() for path in place.committed()]
    own = newest_first(local, find_checkpoints(folder).committed)
    start, checkpoints = choose_start(config, folder, own, lambda act: act())
    start.check(checkpoints, shapes)
    for path in checkpoints:
        try:
            checkpoint = open_checkpoint(path)
        except UnreadableError as error:
            _refuse_if_must(config, error, is_local=path in local)
        else:
            check_resume(checkpoint.facts.config, config, start.other)
            start.check_own(checkpoint, shapes, is_complete=path not in local)
            return checkpoint.facts
    return None  # there is none, or `restore` raises the error


class Start:
    """How a run starts: from initial weights, unless it has a checkpoint. An extension starts it from other weights."""

    other = "another --run_name"  # what to give in order not to continue from the checkpoints that `choose` returns

    def choose(self, own: list[Location], lead: Callable[[Callable[[], Any]], Any]) -> list[Location]:
        """Return the checkpoints to continue from, newest first. own: the run's. lead: runs an act in process 0."""
        return own

    def check(self, checkpoints: list[Location], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError if the run cannot start. checkpoints: those to continue from. shapes: of the parameters."""

    def check_own(self, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], *, is_complete: bool) -> None:
        """Raise UserError if the run cannot continue from a checkpoint. is_complete: it is not a host's own part."""

    def changes(self, saved: Mapping[str, Any]) -> list[Change]:
        """Return what is not as in a checkpoint's configuration, besides settings."""
        return []

    def digest(self) -> str:
        """Return a digest of the weights that the run's checkpoints lack; "" if they have all."""
        return ""

    def load_frozen(self, restoring: Restoring) -> None:
        """Load the weights that the run's checkpoints lack."""

    def unread(self, path: Location) -> list[str]:
        """Return lines on what is not read, because the run continues from `path`."""
        return []

    def load(self, restoring: Restoring) -> Facts | None:
        """Load the weights of a new run; return the facts to begin with. None: those of step 0."""
        restoring.peers.say("starting at step 0 from initial weights")
        return None


def checkpoint_folder(config: TrainConfig, log_dir: Path) -> Location:
    """Return the folder of the run's checkpoints."""
    return location(config.ckpt_save_path or log_dir / CHECKPOINTS)


def choose_start(
    config: TrainConfig, folder: Location, own: list[Location], lead: Callable[[Callable[[], Any]], Any]
) -> tuple[Start, list[Location]]:
    """Return how a run with the checkpoints `own` in `folder` starts, and those to continue from: see Start.choose.

    Raises UserError where `resume` forbids that the run has checkpoints of its own, or has none.
    """
    if own and config.resume == "never":
        raise UserError(f"--resume=never, but {own[0]} exists; remove it, or set another --run_name")
    if not own and config.resume == "must":
        raise UserError("--resume=must, but there is no committed checkpoint; check --ckpt_save_path and --log_dir")
    start: Start = config.start(folder) or Start()
    return start, start.choose(own, lead)


def _refuse_if_must(config: TrainConfig, error: UnreadableError, *, is_local: bool) -> None:
    """Raise UserError with `error`, of a checkpoint that is not passed over."""
    if config.resume == "must" and not is_local:
        raise UserError(f"{error}; --resume=auto continues from an earlier one") from error


@dataclass(frozen=True)
class Restoring:
    """Fills the state of a placed model and its optimizer and commits it; every method is collective over `peers`."""

    config: TrainConfig
    peers: Peers
    state: TrainingState
    start: Start

    def continue_from(self, paths: list[Location], local: Mapping[Location, Place]) -> tuple[Facts, list[Location]]:
        """Load the first of `paths` that can be read; return its facts and the corrupt ones before it.

        local: those of other places, which may lack what this mesh needs. Raises UserError if none can be
        read; with resume=must, if the first that is not local cannot.
        """
        began = time.perf_counter()
        self.start.load_frozen(self)
        for number, path in enumerate(paths):
            try:
                checkpoint = self.peers.each(partial(open_checkpoint, path))  # all agree whether it can be read
                noted = check_resume(checkpoint.facts.config, self.config, self.start.other)
                noted += self.start.changes(checkpoint.facts.config)
                restart = self.lacks_moments(checkpoint)
                names = self.names_to_continue(checkpoint, weights_only=restart)
                if path in local:
                    state = {name: self.state[name] for name in names}
                    self.peers.each(partial(local[path].check, checkpoint, state))
                self.load(checkpoint, names)
            except UnreadableError as error:
                _refuse_if_must(self.config, error, is_local=path in local)
                self.peers.say(f"{error}; this checkpoint is skipped")
                continue
            self.state.commit(restart_optimizer=restart)
            if noted:
                self.peers.say(f"changed since {path.name}: {', '.join(map(str, noted))}")
            if change := describe_rate_change(checkpoint.facts.config, self.config, checkpoint.facts.step):
                self.peers.say(change)
            self.peers.say(f"continuing from {path}, read in {time.perf_counter() - began:.1f} s")
            for line in self.start.unread(path):
                self.peers.say(line)
            return checkpoint.facts, paths[:number]
        raise UserError(f"{paths[0].parent}: none of the checkpoints can be read; check the disk, or move them away")

    def names_to_continue(self, checkpoint: Checkpoint, *, weights_only: bool) -> list[str]:
        """Return the tensors that the checkpoint must contain."""
        names = [name for name in self.state if is_weight(name) or not weights_only]
        saved, has_all = checkpoint.manifest.tensors, self.config.saves_frozen
        # A run that was trained in another precision so far has no loss scale: it starts with the first one.
        return [name for name in names if name in saved or (has_all and name not in OPTIONAL)]

    def lacks_moments(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint has weights alone, and print it."""
        lacking = all(is_weight(name) for name in checkpoint.manifest.tensors)
        if lacking:
            self.peers.say(f"{checkpoint.path} has no optimizer state: moments start at zero")
        return lacking

    def load(self, checkpoint: Checkpoint, names: list[str]) -> None:
        """Fill tensors of the state."""
        load(checkpoint, {name: self.state[name] for name in names}, self.peers, self.config.ckpt_io_workers)
