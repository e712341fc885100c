"""The XLA engine with a model of one's own, whose blocks run as one scanned body."""

from __future__ import annotations

from torch import Tensor, nn

from pretraining.config.errors import ConfigError
from pretraining.config.training import TrainConfig
from pretraining.models.llama import Llama, loss_options
from pretraining.models.ops import next_token_loss
from pretraining.parallel.engine import TrainingState
from pretraining.parallel.sharding import LOGITS
from pretraining.parallel.xla.blocks import mark_both_ways
from pretraining.parallel.xla.engine import XlaEngine, XlaTrainee
from pretraining.tools.library.own_llama import as_llama, own_names, unlike_blocks, weight_decay
from pretraining.tools.library.own_model import OwnModel


class OwnXlaEngine(XlaEngine):
    """See engine.Engine."""

    def __init__(self, description: OwnModel, config: TrainConfig) -> None:
        super().__init__(config)
        self.description = description
        self.layout = self.layout._replace(table=description.table, repeated_heads=False, whole_heads=False)

    def place(self, model: nn.Module) -> XlaTrainee:
        """See engine.Engine."""
        llama = as_llama(self.config, self.description, model)
        if problems := list(unlike_blocks(llama.model.layers, self.description.blocks)):
            raise ConfigError(problems)
        return OwnXlaTrainee(self, llama)


class OwnXlaTrainee(XlaTrainee):
    """See engine.Trainee."""

    engine: OwnXlaEngine

    def __init__(self, engine: OwnXlaEngine, model: Llama) -> None:
        super().__init__(engine, model)
        for parameter in self.step.optimizer.parameters:
            parameter.decay = weight_decay(self.config, engine.description, parameter.name)

    def head_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """See XlaTrainee. The model has returned its logits."""
        spec = self.engine.layout.activation(LOGITS)
        logits = mark_both_ways(hidden, self.engine.xla_mesh, spec, spec)
        return next_token_loss(logits, labels, options=loss_options(self.config))

    def state(self) -> TrainingState:
        """See engine.Trainee."""
        return own_names(self.engine.description, super().state())
