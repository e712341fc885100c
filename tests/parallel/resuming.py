"""Saving a run and resuming it with a new model and optimizer."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretraining.checkpoint.manifest import Facts, open_checkpoint
from pretraining.checkpoint.store import load
from pretraining.config.training import TrainConfig
from pretraining.models.init import build_model
from pretraining.parallel.engine import Trainee
from tests.checkpoint.saving import save


@torch.no_grad()
def poisoned(model: Any) -> Tensor:
    """Make the model's losses and gradients not finite; return what `restore` needs."""
    weight = model.model.norm.weight
    kept: Tensor = weight.detach().clone()
    weight.fill_(torch.nan)
    return kept


@torch.no_grad()
def restore(model: Any, kept: Tensor) -> None:
    """Undo `poisoned`."""
    model.model.norm.weight.copy_(kept)


def save_run(engine: Any, config: TrainConfig, trainee: Trainee, step: int, folder: Path) -> None:
    """Save the run after `step` updates."""
    save(folder, trainee.state(), Facts(step, 0, {}, asdict(config), engine.name, engine.mesh._asdict()))


def resume_run(engine: Any, config: TrainConfig, step: int, folder: Path) -> Trainee:
    """Return the run that `save_run` saved, on this engine."""
    trainee: Trainee = engine.place(build_model(config))
    state = trainee.state()
    load(open_checkpoint(folder / f"step_{step}"), state)
    state.commit()
    return trainee
