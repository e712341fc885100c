"""Checkpoints in a folder of every host's own: fast, lost with the host, and only the newest is kept.

They are written and committed as all others are. With several hosts each has what its own processes hold, so a step can
be continued only where every host still has it, after the same settings; otherwise the run continues from
ckpt_save_path.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretraining.checkpoint.files import UnreadableError, digest, writing_to
from pretraining.checkpoint.folder import find_checkpoints, keep_steps, step_of, sweep
from pretraining.checkpoint.manifest import Checkpoint, Facts, open_checkpoint
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.store import LogicalTensors, PendingSave
from pretraining.extensions.local_tier.saving import HostSave, check_host_has_all, host_of, lead_hosts
from pretraining.storage import DISK, FolderLock, Location


class LocalTier:
    """The folder of this host; see pretraining.checkpoint.folder.Place for the methods."""

    def __init__(self, folder: Path, interval: int, per_host: Collection[str]) -> None:
        """per_host: settings that hosts may have differently."""
        self.folder, self._interval, self._per_host = folder, interval, per_host
        self._lock: FolderLock | None = None
        self._save: type[PendingSave] = PendingSave  # with several hosts HostSave

    def __str__(self) -> str:
        return str(self.folder)

    def open(self, peers: Peers) -> None:
        """Lock the folder. Raises UserError if it cannot be written, or another host has the same."""
        self._peers = peers
        hosts = peers.agree(lambda: host_of(peers))
        self._save = peers.lead(lambda: HostSave if len(set(hosts)) > 1 else PendingSave)
        lead_hosts(peers, self._claim)

    def _claim(self) -> None:
        with writing_to("ckpt_local_path", self.folder):
            self._lock = FolderLock(self.folder, "ckpt_local_path")
            sweep(self.folder)

    def due(self, step: int) -> bool:
        return step > 0 and step % self._interval == 0

    def common(self) -> list[Location]:
        """Return the checkpoints that every host has, newest first; print which one only some have."""
        steps = self._peers.agree(lambda: (socket.gethostname(), dict(map(self._step, self.committed()))))
        common, lost = self._peers.lead(lambda: _common(steps))
        if lost:
            self._peers.say(f"{self.folder}: {lost}")
        return [self.folder / f"step_{step}" for step in common]

    def _step(self, path: Location) -> tuple[int, str]:
        """Return the step of a checkpoint, and a digest of what all hosts that saved it together say; "" if damaged."""
        with suppress(UnreadableError):
            facts = asdict(open_checkpoint(path).facts)
            facts["config"] = {name: value for name, value in facts["config"].items() if name not in self._per_host}
            return step_of(path), digest(json.dumps(facts, sort_keys=True).encode())
        return step_of(path), ""

    def committed(self) -> list[Location]:
        return find_checkpoints(self.folder).committed

    def check(self, checkpoint: Checkpoint, state: LogicalTensors) -> None:
        check_host_has_all(checkpoint, state)

    def plan_save(self, state: LogicalTensors, facts: Facts, peers: Peers, **options: Any) -> PendingSave:
        return self._save(self.folder, state, facts, peers, **options)

    def forget_after(self, step: int) -> None:
        def act() -> None:
            for path in self.committed():
                if step_of(path) > step:
                    DISK.remove_folder(self.folder / path.name)

        lead_hosts(self._peers, act)

    def retain(self) -> None:
        """Remove all but the newest checkpoint, which every host has committed."""
        lead_hosts(self._peers, lambda: keep_steps(self.folder, lambda steps: ()))

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _common(steps: list[tuple[str, dict[int, str]]]) -> tuple[list[int], str]:
    """Return the steps that every host has, newest first, and a sentence if the newest is not one of them.

    steps: (host, its steps and their digests) of every process.
    """
    common = {step for step, _ in set.intersection(*(set(there.items()) for _, there in steps))}
    newest = max((step for _, there in steps for step in there), default=-1)
    without = sorted({host for host, there in steps if newest not in there})
    lost = f"{', '.join(without)} has no step_{newest}" if without else f"step_{newest} is not the same on every host"
    return sorted(common, reverse=True), "" if newest in {-1, *common} else f"{lost}, so it is not used"
