"""Checks that several extensions share. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pretraining.config.errors import Problem, UserError
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem


def without_effect(config: TrainConfig, name: str) -> Iterator[Problem]:
    """Yield a problem if the setting `name` is set although the run never saves."""
    if getattr(config, name) and not config.checkpoint_interval:
        remedy = "has no effect with --checkpoint_interval=0, which never saves; give an interval in steps too"
        yield problem(config, name, remedy)


def check_folder(subject: str, folder: Path) -> Path:
    """Raise UserError if this process cannot write to `folder`, or cannot create it. Return it, or the folder above it
    that exists."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise UserError(f"{subject}: {there} is not a folder; give another one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{subject}: {there} cannot be written; change its permissions, or give another folder")
    return there
