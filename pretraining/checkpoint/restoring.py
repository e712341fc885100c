"""Start a run from its own newest checkpoint, or from other weights.

Whether a checkpoint may be loaded is decided from JSON alone, before any tensor is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pretraining.checkpoint.compatibility import check_moments, check_resume, check_start, describe_rate_change
from pretraining.checkpoint.files import UnreadableError, digest
from pretraining.checkpoint.folder import (
    CHECKPOINTS,
    CheckpointList,
    Place,
    find_checkpoints,
    is_of_other_program,
    newest_first,
    open_any_checkpoint,
)
from pretraining.checkpoint.manifest import EMBEDDING, HEAD, Checkpoint, Facts
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.store import check_fit, is_weight, load
from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.parallel.engine import OPTIONAL, TrainingState
from pretraining.storage import Location, location, opened

SAMPLE = 4096  # bytes of a tensor


def check_starting_point(config: TrainConfig, log_dir: Path, shapes: Mapping[str, tuple[int, ...]]) -> Facts | None:
    """Return the facts of the checkpoint that this run continues from, if there is one, before any device is opened.

    Only JSON is read, and nothing is written. `restore` takes an earlier checkpoint if the tensors turn out to be
    corrupt. Raises UserError if `resume` forbids it, ckpt_load_path has no checkpoint, or a checkpoint does not match
    the configuration and the parameters' `shapes`.
    """
    folder = checkpoint_folder(config, log_dir)
    local = [path for place in config.checkpoint_places() for path in place.committed()]
    checkpoints = find_checkpoints(folder)
    checkpoints = checkpoints._replace(committed=newest_first(local, checkpoints.committed))
    check_policy(config, checkpoints)
    load_path, checkpoints = starting_point(config, folder, checkpoints)
    config = replace(config, ckpt_load_path=load_path)
    if not checkpoints.committed and (added := config.open_added()):
        config.check_trained(added, shapes)
    if load_path and not location(load_path).exists():
        raise UserError(f"--ckpt_load_path={load_path}: there is no such folder; give another one")
    if load_path and not (config.saves_frozen and checkpoints.committed):
        check_other_run(config, shapes)
    for path in checkpoints.committed:
        try:
            checkpoint = open_any_checkpoint(path)
        except UnreadableError:
            if config.resume == "must" and path not in local:
                raise
        else:
            facts = checkpoint.facts
            check_resume(facts.config, config)
            if not config.saves_frozen and path not in local:
                config.check_trained(checkpoint, shapes)
            if config.strict_load:
                check_base(path, facts, config, "give those, or --strict_load=False to continue on these")
            return facts
    return None  # there is none, or `restore` raises the error


def starting_point(config: TrainConfig, folder: Location, checkpoints: CheckpointList) -> tuple[str, CheckpointList]:
    """Return ckpt_load_path, and the checkpoints to continue from, of a run with `checkpoints` in its own `folder`.

    That folder is no path to load as long as it is empty: the command of a first start may name it. With load_step,
    a run without checkpoints of its own continues from that in ckpt_load_path, unless that is at step 0.
    """
    path, starts = location(config.ckpt_load_path), not checkpoints.committed and bool(config.ckpt_load_path)
    if starts and path.resolve() == folder.resolve() and not is_of_other_program(path):
        return "", checkpoints
    continues = starts and config.load_step and not config.load_weights_only
    if continues and (source := open_any_checkpoint(path)).facts.step:
        checkpoints = checkpoints._replace(committed=[source.path])
    return config.ckpt_load_path, checkpoints


def check_other_run(config: TrainConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError if ckpt_load_path has no checkpoint, or one whose tensors this run cannot take."""
    source = open_any_checkpoint(location(config.ckpt_load_path))
    check_start(source.facts.config, config)
    names, differences = common_names(source, shapes, config.is_added, weights_only=True)
    if differences and config.strict_load:
        raise UserError(f"{source.path}: {differences}; --strict_load=False loads what both have")
    check_fit(source, {name: shapes[name] for name in names})
    if not all(map(is_weight, source.manifest.tensors)):
        check_moments(source.facts.config, config)


def check_base(path: Location, facts: Facts, config: TrainConfig, remedy: str) -> None:
    """Raise UserError if adapters in the checkpoint at `path` were trained on other weights than ckpt_load_path's."""
    if facts.base and facts.base != base_digest(config):
        subject = f"--ckpt_load_path={config.ckpt_load_path}: these are not the weights that the adapters"
        raise UserError(f"{subject} of {path} were trained on; {remedy}")


def base_digest(config: TrainConfig) -> str:
    """Return a digest of the frozen weights in ckpt_load_path; "" if checkpoints have them, or they are initial ones.

    Of a folder in Hugging Face's format, which has no digests, the beginning of every tensor is read.
    """
    if config.saves_frozen or not config.ckpt_load_path:
        return ""
    base = open_any_checkpoint(location(config.ckpt_load_path))
    parts = []
    for name, entry in sorted(base.manifest.tensors.items()):
        if is_weight(name):
            digests, first = [each for chunk in entry.pieces for each in chunk.digests], entry.pieces[0]
            if not digests:
                with opened(base.path / first.file) as file:
                    digests = [digest(file.read_at(first.start, min(first.size, SAMPLE)))]
            parts.append(f"{name} {entry.dtype} {entry.shape} {digests}")
    return digest("\n".join(parts).encode())


def checkpoint_folder(config: TrainConfig, log_dir: Path) -> Location:
    """Return the folder of the run's checkpoints."""
    return location(config.ckpt_save_path or log_dir / CHECKPOINTS)


def check_policy(config: TrainConfig, checkpoints: CheckpointList) -> None:
    """Raise UserError where `resume` forbids what is in the folder, or that it holds nothing."""
    if checkpoints.committed and config.resume == "never":
        newest = checkpoints.committed[0]
        raise UserError(f"--resume=never, but {newest} exists; remove it, or set another --run_name")
    if not checkpoints.committed and config.resume == "must":
        raise UserError("--resume=must, but there is no committed checkpoint; check --ckpt_save_path and --log_dir")


def common_names(
    checkpoint: Checkpoint, names: Iterable[str], is_added: Callable[[str], bool], *, weights_only: bool
) -> tuple[list[str], str]:
    """Return which of the state's `names` are in the checkpoint, and what else is in only one of the two, in words.

    What only some runs have is left out (engine.OPTIONAL): a run without it begins anew. So are the
    parameters that an extension added.
    """
    tensors = checkpoint.manifest.tensors
    here, there = (
        {name for name in side if is_weight(name) or not weights_only} - OPTIONAL for side in (names, tensors)
    )
    if HEAD not in here and tensors.get(HEAD) is tensors.get(EMBEDDING):
        there.discard(HEAD)  # tied in both
    new = {name for name in here - there if is_added(name) and is_weight(name)}
    lists = {"only in the model": sorted(here - there - new), "only in the checkpoint": sorted(there - here)}
    return sorted(here & there), "; ".join(f"{where}: {', '.join(names)}" for where, names in lists.items() if names)


@dataclass(frozen=True)
class Restoring:
    """Fills the state of a placed model and its optimizer and commits it; every method is collective over `peers`."""

    config: TrainConfig
    peers: Peers
    state: TrainingState

    def continue_from(self, paths: list[Location], local: Mapping[Location, Place]) -> tuple[Facts, list[Location]]:
        """Load the first of `paths` that can be read; return its facts and the corrupt ones before it.

        local: those of other places, which may lack what this mesh needs. Raises UserError if none can be
        read; with resume=must, if the first that is not local cannot.
        """
        began = time.perf_counter()
        if not self.config.saves_frozen and self.config.ckpt_load_path:
            self._load_base()
        for number, path in enumerate(paths):
            try:
                checkpoint = self._opened(path)
                noted = check_resume(checkpoint.facts.config, self.config)
                restart = self._lacks_moments(checkpoint)
                names = self._names_to_continue(checkpoint, weights_only=restart)
                if path in local:
                    state = {name: self.state[name] for name in names}
                    self.peers.each(partial(local[path].check, checkpoint, state))
                self._load(checkpoint, names)
            except UnreadableError as error:
                if self.config.resume == "must" and path not in local:
                    raise
                self.peers.say(f"{error}; this checkpoint is skipped")
                continue
            self.state.commit(restart_optimizer=restart)
            if noted:
                self.peers.say(f"changed since {path.name}: {', '.join(map(str, noted))}")
            if change := describe_rate_change(checkpoint.facts.config, self.config, checkpoint.facts.step):
                self.peers.say(change)
            self.peers.say(f"continuing from {path}, read in {time.perf_counter() - began:.1f} s")
            self._say_unread(path)
            return checkpoint.facts, paths[:number]
        raise UserError(f"{paths[0].parent}: none of the checkpoints can be read; remove them to start from step 0")

    def _names_to_continue(self, checkpoint: Checkpoint, *, weights_only: bool) -> list[str]:
        """Return the tensors that the checkpoint must contain."""
        names = [name for name in self.state if is_weight(name) or not weights_only]
        if not self.config.saves_frozen:
            return [name for name in names if name in checkpoint.manifest.tensors]
        # A run that was trained in another precision so far has no loss scale: it starts with the first one.
        return [name for name in names if name not in OPTIONAL or name in checkpoint.manifest.tensors]

    def _say_unread(self, path: Location) -> None:
        """Print which paths to start from are not read, because the run continues from its own checkpoint at `path`."""
        base = self.config.ckpt_load_path
        places = (path, path.parent, path.parent.parent)
        is_own = base and location(base).resolve() in [place.resolve() for place in places]
        for name, value in self.config.load_paths.items():
            if value and not (name == "ckpt_load_path" and (is_own or not self.config.saves_frozen)):
                self.peers.say(f"--{name}={value} is not read: only a run without a checkpoint of its own starts there")

    def start(self) -> Facts | None:
        """Load ckpt_load_path's weights and those of an extension, if they are set."""
        facts, restart = None, True
        if not self.config.ckpt_load_path:
            self.peers.say("starting at step 0 from initial weights")
        if self.config.ckpt_load_path:
            facts, restart = self._load_other_run(location(self.config.ckpt_load_path))
        if added := self.peers.each(self.config.open_added):
            self._load(added, [name for name in added.manifest.tensors if name in self.state])
            self.peers.say(f"loaded the adapter in {added.path}")
            restart = True
        if self.config.ckpt_load_path or added:
            self.state.commit(restart_optimizer=restart)
        return facts

    def _load_other_run(self, source: Location) -> tuple[Facts, bool]:
        """Load a checkpoint of another run or Hugging Face's weights; return the facts of step 0, and whether the
        optimizer's state starts from zero."""
        checkpoint = self._opened(source)
        noted = check_start(checkpoint.facts.config, self.config)
        is_added = self.config.is_added
        adds = any(map(is_added, self.state)) and not any(map(is_added, checkpoint.manifest.tensors))
        fresh = self.config.load_weights_only or adds or self._lacks_moments(checkpoint)
        self._load(checkpoint, self._shared_names(checkpoint, weights_only=fresh))
        if noted:
            self.peers.say(f"changed from {checkpoint.path}: {', '.join(map(str, noted))}")
        self.peers.say(f"starting at step 0 from {'the weights of ' if fresh else ''}{checkpoint.path}")
        return replace(checkpoint.facts, step=0, tokens_seen=0, data=None), fresh

    def _load_base(self) -> None:
        """Load the frozen weights below the adapters, which ckpt_load_path has."""
        base = self._opened(location(self.config.ckpt_load_path))
        self._load(base, self._shared_names(base, weights_only=True))
        self.peers.say(f"the frozen weights are those of {base.path}")

    def _shared_names(self, checkpoint: Checkpoint, *, weights_only: bool) -> list[str]:
        """Return the tensors of this process that the checkpoint has, too.

        With strict_load, neither the state of all processes nor the checkpoint may have others.
        """
        parts = self.peers.agree(lambda: list(self.state))  # a stage of a pipeline has some of them
        everywhere = self.peers.lead(lambda: sorted({name for part in parts for name in part}))
        names, differences = common_names(checkpoint, everywhere, self.config.is_added, weights_only=weights_only)
        if differences and self.config.strict_load:
            raise UserError(f"{checkpoint.path}: {differences}; --strict_load=False loads what both have")
        if differences:
            self.peers.say(f"{checkpoint.path}: not loaded, {differences}")
        return [name for name in names if name in self.state]

    def _opened(self, path: Location) -> Checkpoint:
        """Open a checkpoint in every process, so that all agree whether it can be read."""
        return self.peers.each(lambda: open_any_checkpoint(path))

    def _lacks_moments(self, checkpoint: Checkpoint) -> bool:
        lacking = all(is_weight(name) for name in checkpoint.manifest.tensors)
        if lacking:
            self.peers.say(f"{checkpoint.path} has no optimizer state: moments start at zero")
        return lacking

    def _load(self, checkpoint: Checkpoint, names: list[str]) -> None:
        load(checkpoint, {name: self.state[name] for name in names}, self.peers, self.config.ckpt_io_workers)
