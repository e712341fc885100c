"""The XLA engine with stages of devices. See xla_blocks.py."""

from __future__ import annotations

from torch import Tensor

from pretraining.extensions.pipeline.settings import PipelineConfig
from pretraining.extensions.pipeline.xla_blocks import PipelinedBlocks
from pretraining.extensions.pipeline.xla_weights import StagedBlocks
from pretraining.models.llama import loss_options
from pretraining.parallel.xla.engine import XlaEngine, XlaTrainee


class PipelinedXlaEngine(XlaEngine):
    """See engine.Engine. All micro-batches of a step are one graph; a global batch of another size is another graph."""

    config: PipelineConfig

    @property
    def micro_batches_per_graph(self) -> int:
        """See XlaEngine: all of a step."""
        return self.config.gradient_accumulation_steps or 1

    @property
    def trainee_class(self) -> type[PipelinedXlaTrainee]:
        """See XlaEngine."""
        return PipelinedXlaTrainee


class PipelinedXlaTrainee(XlaTrainee):
    """See engine.Trainee."""

    config: PipelineConfig
    run_blocks: PipelinedBlocks

    def open_blocks(self) -> PipelinedBlocks:
        """See XlaTrainee."""
        engine = self.engine
        blocks = StagedBlocks(self.config, self.model, engine.xla_mesh, engine.layout, engine.kernel)
        return PipelinedBlocks(self.config, blocks)

    def head_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """See XlaTrainee."""
        weight, vocabulary = self.model.lm_head.weight, self.model.shape.vocab_size
        return self.run_blocks.head_loss(hidden, weight, labels, vocabulary, loss_options(self.config))
