"""Save a checkpoint in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretraining.checkpoint.manifest import Facts
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.store import LogicalTensors, PendingSave


def save(folder: Path, state: LogicalTensors, facts: Facts, peers: Peers | None = None, **options: Any) -> Path:
    """Write and commit `folder`/step_N; collective over `peers`. options: see PendingSave."""
    PendingSave(folder, state, facts, peers or Peers(), **options).write()
    return folder / f"step_{facts.step}"
