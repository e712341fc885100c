"""The torch engine with stages of processes. See torch_schedule.py."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pretraining.extensions.pipeline.settings import PipelineConfig
from pretraining.extensions.pipeline.torch_schedule import Pipeline, keep_stage
from pretraining.models.llama import Llama
from pretraining.optim.optimizer import Optimizer
from pretraining.parallel.engine import Batch
from pretraining.parallel.step import ShardingTable
from pretraining.parallel.torch.engine import TorchEngine, trained_tokens
from pretraining.parallel.torch.step import TorchStep

EMBEDDING = "model.embed_tokens.weight"


class TiedEmbedding(NamedTuple):
    """The embedding that is the head, too, where the first and the last stage have a copy each."""

    group: dist.ProcessGroup  # of the two processes with the same shard
    is_counted: bool  # whether this process's copy is the one that norms count


class PipelinedTorchEngine(TorchEngine):
    """See engine.Engine. Every stage is fed the same rows."""

    config: PipelineConfig
    device_mesh: DeviceMesh
    axes = ("stage", *TorchEngine.axes)

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self.tied = tied_embedding(self.config, self.device_mesh)

    def divide(self, model: Llama) -> dict[nn.Module, Iterable[nn.Module]]:
        """See TorchEngine. Leaves this stage's part of `model`, and returns its pieces."""
        ranks = self.device_mesh["stage"]
        keep_stage(self.config, model, ranks.get_local_rank())
        self.pipeline = Pipeline(self.config, model, ranks, self.blocks, self.read_inputs)
        return {piece: piece.layers for piece in self.pipeline.pieces.values()}

    def prepare(self, optimizer: Optimizer) -> None:
        """See engine.Engine."""
        super().prepare(optimizer)
        self.pipeline.open(self.device, self.choose_collectives, self.step.add_gradients)

    def open_step(self, optimizer: Optimizer) -> TorchStep:
        """See TorchEngine."""
        step = PipelinedStep(self.config, optimizer, self.home, self.shards, self.tensor_ranks)
        step.tied = self.tied
        return step

    def sharding_tables(self) -> list[ShardingTable]:
        """See TorchEngine."""
        own = super().sharding_tables()
        tables = own * self.process_count
        dist.all_gather_object(tables, own[0])
        return tables

    def accumulate(self, model: Llama, batch: Batch) -> None:
        """See TorchEngine. All micro-batches pass through the stages; the last stage counts loss and tokens."""
        on_device = self.to_device(batch)
        loss = self.pipeline.run(on_device)
        if self.pipeline.has_last:
            self.step.add_loss(loss, trained_tokens(on_device))

    def evaluated(self, model: Llama, batch: dict[str, Tensor]) -> Tensor:
        """See TorchEngine."""
        loss = self.pipeline.forward(batch)
        return torch.zeros(2, device=self.device) if loss is None else torch.stack((loss, trained_tokens(batch)))


class PipelinedStep(TorchStep):
    """See TorchStep."""

    tied: TiedEmbedding | None = None  # the embedding, where another stage has a copy of it

    def complete(self, gradients: dict[str, Tensor]) -> None:
        """See TorchStep."""
        super().complete(gradients)
        if self.tied and EMBEDDING in gradients:
            dist.all_reduce(gradients[EMBEDDING], group=self.tied.group)

    def power_sum(self, shards: dict[str, Tensor], order: float = 2.0) -> Tensor:
        """See TorchStep. Of two copies of a tied embedding, one is counted."""
        if self.tied and not self.tied.is_counted:
            shards = {name: shard for name, shard in shards.items() if name != EMBEDDING}
        return super().power_sum(shards, order)


def tied_embedding(config: PipelineConfig, grid: DeviceMesh) -> TiedEmbedding | None:
    """Return the embedding that first and last stage share, in their processes. Collective; grid: stages first."""
    if not config.tie_word_embeddings:
        return None
    ends = grid.mesh.flatten(1)[[0, -1]].t().tolist()
    group, _ = dist.new_subgroups_by_enumeration(ends, timeout=timedelta(seconds=config.collective_timeout))
    return TiedEmbedding(group, grid.get_local_rank("stage") == 0) if group else None
