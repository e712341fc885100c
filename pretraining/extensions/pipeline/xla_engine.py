"""The XLA engine with stages of devices. See xla_blocks.py."""

from __future__ import annotations

from torch import Tensor

from pretraining.extensions.pipeline.settings import PipelineConfig
from pretraining.extensions.pipeline.xla_blocks import PipelinedBlocks
from pretraining.extensions.pipeline.xla_weights import StagedBlocks
from pretraining.models.llama import Llama, loss_options
from pretraining.parallel.xla.engine import XlaEngine


class PipelinedXlaEngine(XlaEngine):
    """See engine.Engine. All micro-batches of a step are one graph; a global batch of another size is another graph."""

    config: PipelineConfig
    run_blocks: PipelinedBlocks

    @property
    def micro_batches_per_graph(self) -> int:
        """See XlaEngine: all of a step."""
        return self.config.gradient_accumulation_steps or 1

    def open_blocks(self, model: Llama) -> PipelinedBlocks:
        """See XlaEngine."""
        return PipelinedBlocks(self.config, self.scanned_blocks(model, StagedBlocks))

    def head_loss(self, model: Llama, hidden: Tensor, labels: Tensor) -> Tensor:
        """See XlaEngine."""
        options = loss_options(self.config)
        return self.run_blocks.head_loss(hidden, model.lm_head.weight, labels, model.shape.vocab_size, options)
