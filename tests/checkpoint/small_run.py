"""A small training run on plain torch: what the tests of this room save, continue, kill and start again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from main_training import CONFIGURATION
from pretraining.checkpoint.checkpoints import Checkpoints, SaveFailedError
from pretraining.checkpoint.manifest import Facts
from pretraining.config.training import TrainConfig
from pretraining.models.init import build_model
from pretraining.models.ops import next_token_loss
from pretraining.parallel.engine import TrainingState
from tests.end_to_end.small import MODEL

DIMENSIONS = {**MODEL, "hidden_size": 16, "intermediate_size": 32, "seq_length": 16}


def small_config(folder: Path, **fields: Any) -> Any:
    """A model of 8 thousand parameters that saves every second step under `folder`; with the settings of extensions."""
    return CONFIGURATION(**{**DIMENSIONS, "num_steps": 8, "checkpoint_interval": 2, "log_dir": str(folder), **fields})


class PlainTrainee(NamedTuple):
    """The part of engine.Trainee that checkpoints see, for a model that every process holds whole."""

    model: nn.Module
    optimizer: torch.optim.AdamW

    def state(self) -> TrainingState:
        """See engine.Trainee."""
        model, optimizer = self
        state: dict[str, Any] = {name: weight.detach() for name, weight in model.named_parameters()}
        trained = [
            (name, optimizer.state[weight]) for name, weight in model.named_parameters() if weight in optimizer.state
        ]
        for name, moments in trained:
            state |= {f"optimizer.{key}.{name}": moments[key] for key in ("exp_avg", "exp_avg_sq")}
        state["optimizer.step"] = next(iter(optimizer.state.values()))["step"]
        return TrainingState(state, lambda restart: None)  # a load writes into the live tensors


def open_run(config: TrainConfig) -> PlainTrainee:
    """A model and an optimizer whose state exists and has one step count for all."""
    model = build_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
    count = torch.zeros(())
    for weight in model.parameters():
        optimizer.state[weight] = {
            "step": count,
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
    return PlainTrainee(model, optimizer)


def train_step(model: nn.Module, optimizer: torch.optim.AdamW, config: TrainConfig, step: int) -> float:
    """Update number `step` (1-based) on a batch that is a function of the step; the loss."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (2, config.seq_length + 1), generator=generator)
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()
    loss.backward()
    count = optimizer.state[next(model.parameters())]["step"]
    for weight in model.parameters():  # torch counts per parameter: give each its own for the update
        optimizer.state[weight]["step"] = count.clone()
    optimizer.step()
    count += 1
    for weight in model.parameters():
        optimizer.state[weight]["step"] = count
    optimizer.zero_grad()
    return loss.item()


def facts_of(config: TrainConfig, step: int) -> Facts:
    """What a loop would save beside the tensors."""
    tokens = step * 2 * config.seq_length
    return Facts(step, tokens, {"sequences": 2 * step}, asdict(config), "plain", {"shard": 1})


def train(config: TrainConfig, report: Callable[[int, float], None]) -> int:
    """Train to config.num_steps, continuing if there is something to continue; the first step that was done."""
    trainee = open_run(config)
    checkpoints = Checkpoints(config, Path(config.log_dir))
    facts = checkpoints.restore(trainee)  # type: ignore[arg-type]
    start = facts.step if facts else 0
    if checkpoints.due(0) and start == 0:
        checkpoints.save(trainee.state(), facts_of(config, 0))
    try:
        for step in range(start + 1, config.num_steps + 1):
            report(step, train_step(*trainee, config, step))
            if checkpoints.due(step):
                checkpoints.save(trainee.state(), facts_of(config, step))
    except BaseException:  # a process that is killed has no thread that writes or removes while the next run starts
        with suppress(SaveFailedError):
            checkpoints.wait()
        raise
    checkpoints.close()
    return start + 1
