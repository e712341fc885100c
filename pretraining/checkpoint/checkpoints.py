"""The checkpoints of one run: when to save, what to keep, where to continue.

The loop asks `due`, hands over the state, and forgets; the engine is known only by its protocol. Steps are counted
after the update: step_100 holds what 100 updates made.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pretraining.checkpoint.compatibility import check_resume, check_start
from pretraining.checkpoint.files import FolderLock, UnreadableError, set_aside
from pretraining.checkpoint.folder import CHECKPOINTS, Found, find_checkpoints, keep_newest, sweep
from pretraining.checkpoint.huggingface import open_source
from pretraining.checkpoint.manifest import Checkpoint, Facts
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.store import HostBuffer, PendingSave, State, is_weight, load
from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.validate import parse_steps
from pretraining.monitor.memory import available_memory
from pretraining.parallel.engine import Engine

DTYPES_ON_DISK = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}


class SaveFailedError(RuntimeError):
    """Too many saves in a row failed, or the last one of the run did."""


def check_source(config: TrainConfig, log_dir: Path) -> None:
    """Refuse a start that cannot go well before any device is opened: only JSON is read, and nothing is written.

    UserError where `resume` forbids what is there, ckpt_load_path names nothing, or a checkpoint is of another model.
    """
    found = find_checkpoints(checkpoint_folder(config, log_dir))
    check_policy(config, found)
    if not found.committed:
        if config.ckpt_load_path:
            check_start(open_source(Path(config.ckpt_load_path)).facts.config, config)
        return
    try:
        newest = open_source(found.committed[0])
    except UnreadableError:
        if config.resume == "must":
            raise
        return  # `restore` looks for one that can be read
    check_resume(newest.facts.config, config)


def checkpoint_folder(config: TrainConfig, log_dir: Path) -> Path:
    """Where the run's checkpoints are."""
    return Path(config.ckpt_save_path or log_dir / CHECKPOINTS)


def check_policy(config: TrainConfig, found: Found) -> None:
    """UserError where `resume` forbids what was found, or that nothing was."""
    if found.committed and config.resume == "never":
        raise UserError(f"--resume=never, but {found.committed[0]} is there; remove it or give another ckpt_save_path")
    if not found.committed and config.resume == "must":
        raise UserError("--resume=must, but there is no committed checkpoint; look at --ckpt_save_path and --log_dir")


class Checkpoints:
    """One per run and process; every method is collective over the processes."""

    def __init__(self, config: TrainConfig, log_dir: Path) -> None:
        """Claim the folder if this run saves. UserError where another run holds it or it cannot be written."""
        self._config, self._peers = config, Peers()
        self.folder = checkpoint_folder(config, log_dir)
        self._extra = set(parse_steps(config.extra_checkpoint_steps))
        self._lock: FolderLock | None = None
        self._saved: int | None = None  # newest step that is committed, or being written
        self._failures = 0  # saves in a row
        self._writer: threading.Thread | None = None
        self._outcome: Exception | None = None
        self._buffer = HostBuffer()
        if config.checkpoint_interval:
            self._peers.lead(self._claim)

    def _claim(self) -> None:
        try:
            self._lock = FolderLock(self.folder)
            sweep(self.folder)
        except OSError as error:
            raise UserError(
                f"--ckpt_save_path={self.folder}: cannot be written ({error.strerror}); "
                "give another folder, or --checkpoint_interval=0 to save nothing"
            ) from error

    # ---- Continuing

    def restore(self, engine: Engine, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Facts | None:
        """Fill model and optimizer from the run's newest checkpoint, or from ckpt_load_path; None to start afresh.

        The facts are those to go on with: of ckpt_load_path, step 0 with no token seen and no state of the data.
        """
        found = self._peers.lead(lambda: find_checkpoints(self.folder))
        for path in found.skipped:
            self._say(f"{path} has no marker, so its save was never finished; it is ignored")
        check_policy(self._config, found)
        if found.committed:
            return self._continue(found.committed, engine, model, optimizer)
        if self._config.ckpt_load_path:
            return self._start_from(Path(self._config.ckpt_load_path), engine, model, optimizer)
        return None

    def _continue(self, paths: list[Path], engine: Engine, model: Any, optimizer: Any) -> Facts:
        """From the first of `paths` that can be read, if the policy lets a damaged one pass."""
        for number, path in enumerate(paths):
            try:
                checkpoint = self._opened(path)
                noted = check_resume(checkpoint.facts.config, self._config)
                state = engine.state(model, None if self._lacks_moments(checkpoint) else optimizer)
                load(checkpoint, state, self._peers, self._config.ckpt_io_workers)
            except UnreadableError as error:
                if self._config.resume == "must":
                    raise
                self._say(f"{error}; the checkpoint is passed over")
                continue
            engine.commit(state)
            self._set_aside(paths[:number])
            if noted:
                self._say(f"changed since {path.name}: {', '.join(map(str, noted))}")
            self._say(f"continuing from {path}")
            self._saved = checkpoint.facts.step
            return checkpoint.facts
        raise UserError(f"{self.folder}: none of its checkpoints can be read; remove them to start again")

    def _set_aside(self, damaged: list[Path]) -> None:
        """If this run saves: else the next removal of old checkpoints would count these, and keep them alone."""
        for path in damaged if self._config.checkpoint_interval else ():
            self._peers.lead(partial(set_aside, path))

    def _start_from(self, source: Path, engine: Engine, model: Any, optimizer: Any) -> Facts:
        """From a checkpoint of another run, or Hugging Face's: its weights, its moments if it has any, step 0."""
        checkpoint = self._opened(source)
        noted = check_start(checkpoint.facts.config, self._config)
        fresh = self._config.load_weights_only or self._lacks_moments(checkpoint)
        state = self._shared(checkpoint, engine.state(model, None if fresh else optimizer), weights_only=fresh)
        load(checkpoint, state, self._peers, self._config.ckpt_io_workers)
        engine.commit(state)
        if noted:
            self._say(f"other than in {checkpoint.path}: {', '.join(map(str, noted))}")
        self._say(f"starting at step 0 from {'the weights of ' if fresh else ''}{checkpoint.path}")
        return replace(checkpoint.facts, step=0, tokens_seen=0, data={})

    def _shared(self, checkpoint: Checkpoint, state: State, *, weights_only: bool) -> State:
        """The part of `state` that the checkpoint has too: all of it, and nothing else, with strict_load."""
        there = {name for name in checkpoint.manifest.tensors if is_weight(name) or not weights_only}
        lists = {
            "only in the model": sorted(state.keys() - there),
            "only in the checkpoint": sorted(there - state.keys()),
        }
        told = "; ".join(f"{where}: {', '.join(names)}" for where, names in lists.items() if names)
        if told and self._config.strict_load:
            raise UserError(f"{checkpoint.path}: {told}; --strict_load=False loads what both have")
        if told:
            self._say(f"{checkpoint.path}: not loaded, {told}")
        return {name: value for name, value in state.items() if name in there}

    def _opened(self, path: Path) -> Checkpoint:
        """Read in every process, so that all agree whether it can be."""
        opened: list[Checkpoint] = []
        self._peers.agree(lambda: opened.append(open_source(path)))
        return opened[0]

    def _lacks_moments(self, checkpoint: Checkpoint) -> bool:
        lacking = all(is_weight(name) for name in checkpoint.manifest.tensors)
        if lacking:
            self._say(f"{checkpoint.path} holds no optimizer state: moments start at zero")
        return lacking

    # ---- Saving

    def due(self, step: int) -> bool:
        """Whether the state after `step` updates is to be saved; never twice."""
        interval = self._config.checkpoint_interval
        if not interval or step == self._saved:
            return False
        if step == self._config.num_steps or step in self._extra:
            return True
        if self._config.checkpoint_scale == "log":
            return is_power(step, interval)
        return step > 0 and step % interval == 0

    def save(self, step: int, state: State, facts: Facts) -> None:
        """Save `state`, or begin to: with async_checkpointing it may change as soon as this returns.

        Does nothing where checkpoint_interval is 0 or the step is saved already. A save that fails is reported;
        SaveFailedError after ckpt_max_failures in a row.
        """
        self.wait()
        if not self._config.checkpoint_interval or step == self._saved:
            return
        kept = {name: value for name, value in state.items() if self._config.save_optimizer or is_weight(name)}
        began = time.perf_counter()
        try:
            pending = self._planned(kept, replace(facts, step=step))
            if self._config.async_checkpointing and self._has_room(pending):
                self._begin(pending, step, began)
            else:
                self._finish(pending, step, began)
        except OSError as error:
            self._failed(error)
        else:
            self._saved = step

    def _planned(self, state: State, facts: Facts) -> PendingSave:
        dtype = DTYPES_ON_DISK[self._config.checkpoint_dtype]
        return PendingSave(self.folder, state, facts, self._peers, dtype=dtype, workers=self._config.ckpt_io_workers)

    def _has_room(self, pending: PendingSave) -> bool:
        """Whether every host can hold its processes' copies; if not, training waits for the disk instead."""
        more = max(pending.host_bytes - self._buffer.size, 0)
        asked = self._peers.agree(lambda: (socket.gethostname(), more, available_memory()))
        short = self._peers.lead(lambda: shortage(asked))
        if short:
            self._say(f"{short}; this save is not asynchronous")
        return not short

    def _begin(self, pending: PendingSave, step: int, began: float) -> None:
        pending.stage(self._buffer)

        def work() -> None:
            try:
                self._finish(pending, step, began)
            except Exception as error:  # raised by `wait`, in the thread that can act on it
                self._outcome = error

        self._writer = threading.Thread(target=work, name=f"checkpoint-{step}")
        self._writer.start()

    def _finish(self, pending: PendingSave, step: int, began: float) -> None:
        path = pending.write()
        self._failures = 0
        self._say(f"saved {path} in {time.perf_counter() - began:.1f} s")
        self._retain()

    def _retain(self) -> None:
        if not self._config.keep_last_n_checkpoints or self._lock is None:
            return
        try:
            keep_newest(self.folder, self._config.keep_last_n_checkpoints)
        except OSError as error:  # the new checkpoint is safe; the next save tries again
            self._say(f"an old checkpoint could not be removed: {error}")

    def wait(self) -> None:
        """Until what was begun is committed. SaveFailedError if that was one failure too many."""
        if self._writer is None:
            return
        self._writer.join()
        self._writer, error, self._outcome = None, self._outcome, None
        if isinstance(error, OSError):
            self._failed(error)
        elif error is not None:
            raise error

    def _failed(self, error: OSError) -> None:
        self._saved = None
        self._failures += 1
        self._say(f"saving to {self.folder} failed: {error}; earlier checkpoints are untouched")
        if self._failures >= self._config.ckpt_max_failures:
            raise SaveFailedError(f"{self._failures} saves in a row failed, the last one with: {error}") from error

    def close(self) -> None:
        """Wait, and let others use the folder. SaveFailedError if the last save failed: the run's end is not kept."""
        self.wait()
        self._retain()  # a kill after the last save came before it
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._failures:
            raise SaveFailedError(f"the last save to {self.folder} failed")

    def _say(self, text: str) -> None:
        if self._peers.leads:
            print(text, flush=True)


def shortage(asked: list[tuple[str, int, int]]) -> str:
    """What is wrong if a host's processes together ask for more than it has; each: (host, bytes asked, bytes free)."""
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for host, size, available in asked:
        needed[host] += size
        free[host] = min(available, free.get(host, available))
    for host, size in needed.items():
        if size > free[host]:
            return f"{host} has {free[host] / 1e9:.1f} GB of memory left for copies of {size / 1e9:.1f} GB"
    return ""


def is_power(step: int, base: int) -> bool:
    """Whether `step` is base**k for some k >= 0; base at least 2."""
    while step > 1 and step % base == 0:
        step //= base
    return step == 1
