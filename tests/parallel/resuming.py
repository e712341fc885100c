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
from pretraining.parallel.engine import Batch, Trainee
from tests.checkpoint.saving import save

Figures = dict[str, list[float | None]]


class Uninterrupted:
    """A run that goes on after another one has been resumed from its checkpoint, and its figures of every step."""

    def __init__(self, trainee: Trainee, figures: Figures) -> None:
        self.trainee = trainee
        self.figures = {name: [*values] for name, values in figures.items()}

    def train(self, batch: Batch, rate: float) -> None:
        """Train a step."""
        add_figures(self.figures, self.trainee.train_step(batch, rate).read())


def add_figures(figures: Figures, read: dict[str, float]) -> None:
    """Add those of a step; None for one that it does not have."""
    for name, values in figures.items():
        values.append(read.get(name))


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


def stop_and_resume(engine: Any, config: TrainConfig, trainee: Trainee, step: int, folder: Path) -> Trainee:
    """Save the run after `step` updates, unless the folder is there, and return the run that the folder has."""
    if not folder.exists():
        save(folder, trainee.state(), Facts(step, 0, {}, asdict(config), engine.name, engine.mesh._asdict()))
    return resume_run(engine, config, step, folder)


def resume_run(engine: Any, config: TrainConfig, step: int, folder: Path) -> Trainee:
    """Return the run of a checkpoint on this engine."""
    trainee: Trainee = engine.place(build_model(config))
    state = trainee.state()
    load(open_checkpoint(folder / f"step_{step}"), state)
    state.commit()
    return trainee
