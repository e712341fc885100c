"""The checkpoints of one run: when to save, which to keep, and locks against other runs.

The loop asks `due` and hands over the state; of the engine only the protocol is used. Steps are counted after the
update: step_100 is the state after 100 updates.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pretraining.checkpoint.files import writing_to
from pretraining.checkpoint.folder import Place, find_checkpoints, keep_steps, newest_first, sweep
from pretraining.checkpoint.manifest import Facts
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.restoring import Restoring, checkpoint_folder, choose_start
from pretraining.checkpoint.store import LogicalTensors, PendingSave, is_weight
from pretraining.config.training import TrainConfig
from pretraining.parallel.engine import Trainee
from pretraining.storage import FolderLock, Location, store_of

DTYPES_ON_DISK = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}


def saved_part(state: LogicalTensors, config: TrainConfig) -> LogicalTensors:
    """Return what a checkpoint has of a state."""
    weights = [name for name in state if is_weight(name) and (config.saves_frozen or config.is_trained(name))]
    others = [name for name in state if not is_weight(name) and config.save_optimizer]
    return {name: state[name] for name in (*weights, *others)}


class SaveFailedError(RuntimeError):
    """Too many saves in a row have failed, or the last one of the run."""


class Checkpoints:
    """One per run and process; every method but `due` is collective over the processes."""

    def __init__(self, config: TrainConfig, log_dir: Path) -> None:
        """Lock `log_dir`, and the folder of checkpoints if this run saves.

        Raises UserError if another run has one of them or it cannot be written.
        """
        self._config, self._peers = config, Peers(timeout=config.collective_timeout)
        self.folder = checkpoint_folder(config, log_dir)
        self._locks: list[FolderLock] = []
        self.newest: int | None = None  # newest step that is committed, or being written
        self._before: int | None = None  # the one before it
        # Of saves to `folder` in a row; Start.digest of the run; seconds until a save was committed
        self._failures, self._base, self.longest_save = 0, "", 0.0
        self.saved_to: Place | None = None  # where the newest step is; None: in `folder`
        self._background = config.background_saves(self._peers)
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="removal")  # a disk takes 0.26 s a GB
        self._removal: Future[None] | None = None  # of old checkpoints, after the last save
        self._peers.lead(lambda: self._claim(log_dir))
        self._places: list[Place] = config.checkpoint_places()
        for place in self._places:
            place.open(self._peers)

    def _claim(self, log_dir: Path) -> None:
        with writing_to("log_dir", log_dir):  # a run that saves nothing writes its metrics there
            self._locks.append(FolderLock(log_dir, "log_dir" if self._config.log_dir else "run_name"))
        if not self._config.checkpoint_interval:
            return
        remedy = "give another folder, or --checkpoint_interval=0 to save nothing"
        with writing_to("ckpt_save_path", self.folder, remedy):
            if lock := store_of(self.folder).lock(self.folder, "ckpt_save_path"):
                self._locks.append(lock)
            sweep(self.folder)

    # ---- Continuing

    def restore(self, trainee: Trainee) -> Facts | None:
        """Load the run's newest checkpoint, or the weights to start from; return the facts to continue with.

        Those of ckpt_load_path are at step 0 without data state. None if there is nothing to load.
        """
        checkpoints = self._peers.lead(lambda: find_checkpoints(self.folder))
        for path in checkpoints.uncommitted:
            self._peers.say(f"{path} has no marker: its save was never finished, and it is ignored")
        local = {path: place for place in self._places for path in place.common()}
        own = newest_first(local, checkpoints.committed)
        start, chosen = choose_start(self._config, self.folder, own, self._peers.lead)
        restoring = Restoring(self._config, self._peers, trainee.state(), start)
        facts = self._continue(restoring, chosen, local) if chosen else start.load(restoring)
        if self._config.checkpoint_interval:
            self._base = self._peers.lead(start.digest)
        for place in self._places:
            place.forget_after(facts.step if facts else 0)
        return facts

    def _continue(self, restoring: Restoring, paths: list[Location], local: Mapping[Location, Place]) -> Facts:
        facts, damaged = restoring.continue_from(paths, local)
        self.newest, self.saved_to = facts.step, local.get(paths[len(damaged)])
        if self._config.checkpoint_interval:  # the removal of old checkpoints would count the corrupt ones
            for path in (path for path in damaged if path not in local):
                self._peers.lead(partial(store_of(path).set_aside, path))
        return facts

    # ---- Saving

    def due(self, step: int) -> bool:
        """Return whether the state after `step` updates is to be saved and is not saved yet."""
        if not self._config.checkpoint_interval or step == self.newest:
            return False
        return self._config.saves_at(step) or self._place(step) is not None

    def _place(self, step: int) -> Place | None:
        """Return the other place to which a step is saved."""
        return next((place for place in self._places if place.due(step)), None)

    def save(self, state: LogicalTensors, facts: Facts, *, asked: bool = False) -> None:
        """Save `state`, or start to: with async_checkpointing it may change as soon as this returns.

        asked: by a signal or the clock, which save to `folder` after any step. Does nothing if checkpoint_interval is 0
        or the step is saved already, there if asked. A failed save is printed; ckpt_max_failures in a row to `folder`
        raise SaveFailedError.
        """
        self.wait()
        step = facts.step
        if not self._config.checkpoint_interval or (step == self.newest and not (asked and self.saved_to)):
            return
        began = time.perf_counter()
        self.saved_to = place = None if asked or self._config.saves_at(step) else self._place(step)
        plan = place.plan_save if place else partial(PendingSave, self.folder)
        dtype, workers = DTYPES_ON_DISK[self._config.checkpoint_dtype], self._config.ckpt_io_workers
        try:
            facts = replace(facts, base=self._base)
            pending = plan(saved_part(state, self._config), facts, self._peers, dtype=dtype, workers=workers)
            finish = partial(self._finish, pending, began, place)
            if not (self._background and self._background.start(pending, finish)):
                finish()
        except OSError as error:
            self._failed(error)
        else:
            self._before, self.newest = self.newest, step

    def _finish(self, pending: PendingSave, began: float, place: Place | None) -> None:
        path = pending.write()
        self._failures = self._failures if place else 0
        self.longest_save = max(self.longest_save, seconds := time.perf_counter() - began)
        self._peers.say(f"saved {path} in {seconds:.1f} s")
        if place:
            place.retain()
        else:
            self._removal = self._remover.submit(self._retain)

    def _retain(self) -> None:
        if not (self._config.checkpoint_interval and self._config.keep_last_n_checkpoints and self._locks):
            return
        try:
            keep_steps(self.folder, self._config.kept_steps)
        except OSError as error:  # the new checkpoint is safe; the next save tries again
            self._peers.say(f"an old checkpoint could not be removed: {error}")

    def wait(self) -> None:
        """Wait for the save that was started and for removals. Raises SaveFailedError after too many failures."""
        try:
            if self._background:
                self._background.wait()
        except OSError as error:
            self.newest = self._before
            self._failed(error)
        if self._removal:
            self._removal.result()

    def _failed(self, error: OSError) -> None:
        if not self.saved_to:  # another place is one more: the run goes on without it
            self._failures += 1
        self._peers.say(f"saving to {self.saved_to or self.folder} failed: {error}; earlier checkpoints are untouched")
        if not self.saved_to and self._failures >= self._config.ckpt_max_failures:
            raise SaveFailedError(f"{self._failures} saves in a row failed, the last one with: {error}") from error

    def close(self) -> None:
        """Wait for the last save and release the folders. Raises SaveFailedError if that save failed."""
        self.wait()
        self._retain()  # the run may have been killed between its last save and the removal of old ones
        self.release()
        if self._failures:
            raise SaveFailedError(f"the last save to {self.folder} failed")

    def release(self) -> None:
        """Leave the folders to other runs, as a notebook does that goes on; not while a thread writes to one."""
        if not (self._background and self._background.is_writing):
            held: list[FolderLock | Place] = [*self._locks, *self._places]
            for each in held:
                each.release()
            self._locks.clear()
