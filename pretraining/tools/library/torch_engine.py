"""The torch engine with a model of one's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.optim.optimizer import Optimizer
from pretraining.parallel.engine import TrainingState
from pretraining.parallel.torch.engine import TorchEngine, TorchTrainee
from pretraining.parallel.torch.step import TorchStep
from pretraining.tools.library.own_llama import as_llama, own_names, weight_decay
from pretraining.tools.library.own_model import OwnModel


class OwnTorchEngine(TorchEngine):
    """See engine.Engine."""

    def __init__(self, description: OwnModel, config: TrainConfig) -> None:
        super().__init__(config)
        self.description, self.layout = description, self.layout._replace(table=description.table)
        if self.device_mesh is None and self.precision.activations != torch.float32:
            remedy = "FSDP casts the parameters of a model of one's own, and one process on a CPU runs without it"
            raise UserError(f"--precision={config.precision_mode}: {remedy}; use fp32, or torchrun")

    def place(self, model: nn.Module) -> TorchTrainee:
        """See engine.Engine."""
        return OwnTorchTrainee(self, as_llama(self.config, self.description, model))


class OwnTorchTrainee(TorchTrainee):
    """See engine.Trainee."""

    engine: OwnTorchEngine

    def divide(self) -> dict[nn.Module, Iterable[nn.Module]]:
        """See TorchTrainee. The model may read its embedding anywhere, as a tied head does."""
        self.config = replace(self.config, tie_word_embeddings=True)
        return super().divide()

    def open_step(self, optimizer: Optimizer) -> TorchStep:
        """See TorchTrainee."""
        for parameter in optimizer.parameters:
            parameter.decay = weight_decay(self.config, self.engine.description, parameter.name)
        return super().open_step(optimizer)

    def state(self) -> TrainingState:
        """See engine.Trainee."""
        return own_names(self.engine.description, super().state())
