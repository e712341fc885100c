"""Where and how often a host saves for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pretraining.config.declaration import PER_HOST, AtLeast, Needs, Resume, settings_of
from pretraining.config.errors import Problem, UserError
from pretraining.config.training import TrainConfig
from pretraining.extensions.checks import without_effect


@dataclass(frozen=True)
class LocalTierConfig(TrainConfig):
    """A configuration with a folder of every host for checkpoints."""

    # ---- Checkpoints
    ckpt_local_path: Annotated[str, Resume.FREE, PER_HOST] = ""
    """Local folder of every host, for checkpoints every ckpt_local_interval steps between those in ckpt_save_path. Only
    the newest is kept; the folder is this run's own. A start continues from the newest step that is complete in either
    place, so that a process that died costs few steps; after the loss of a host, or on another mesh of several hosts,
    it is that in ckpt_save_path. Empty: none."""
    ckpt_local_interval: Annotated[int, AtLeast(1), Needs("ckpt_local_path"), Resume.FREE] = 100
    """Optimizer steps between checkpoints in ckpt_local_path."""

    def output_folders(self) -> tuple[str, ...]:
        """See TrainConfig."""
        return (*super().output_folders(), "ckpt_local_path")

    def checkpoint_places(self) -> list[Any]:
        """See TrainConfig."""
        if not self.ckpt_local_path:
            return super().checkpoint_places()
        from pretraining.extensions.local_tier.tier import LocalTier

        per_host = {name for name, setting in settings_of(type(self)).items() if PER_HOST in setting.traits}
        return [*super().checkpoint_places(), LocalTier(Path(self.ckpt_local_path), self.ckpt_local_interval, per_host)]


def check_local_path(config: LocalTierConfig) -> Iterator[Problem]:
    """A run that never saves does not save to the hosts' own folders."""
    yield from without_effect(config, "ckpt_local_path")


def check_local_folder(config: LocalTierConfig) -> None:
    """Raise UserError if ckpt_local_path is the folder of the run's other checkpoints, or has those of another run."""
    if not config.ckpt_local_path:
        return
    from pretraining.checkpoint.compatibility import saved_config
    from pretraining.checkpoint.files import UnreadableError
    from pretraining.checkpoint.folder import find_checkpoints
    from pretraining.checkpoint.manifest import open_checkpoint
    from pretraining.checkpoint.restoring import checkpoint_folder

    folder = checkpoint_folder(config, config.run_folder)
    if Path(config.ckpt_local_path).resolve() == folder.resolve():
        raise UserError(f"--ckpt_local_path={folder}: is the folder of the other checkpoints; give another one")
    for path in find_checkpoints(Path(config.ckpt_local_path)).committed:
        with suppress(UnreadableError):  # which a start passes over
            saved = saved_config(open_checkpoint(path).facts.config, type(config))
            if (other := checkpoint_folder(saved, saved.run_folder)).resolve() != folder.resolve():
                remedy = f"is of the run that saves to {other}; give another folder, or remove {path}"
                raise UserError(f"--ckpt_local_path={config.ckpt_local_path}: {path.name} {remedy}")


CHECKS = (check_local_path,)
