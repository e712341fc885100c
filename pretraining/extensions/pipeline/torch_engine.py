"""The torch engine with stages of processes. See torch_schedule.py."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pretraining.extensions.pipeline.settings import PipelineConfig
from pretraining.extensions.pipeline.stages import pieces_of
from pretraining.extensions.pipeline.torch_schedule import Piece, Pipeline, keep_stage
from pretraining.models.llama import Llama
from pretraining.optim.optimizer import Optimizer
from pretraining.parallel.engine import Batch
from pretraining.parallel.torch.engine import TorchEngine, TorchTrainee, trained_tokens
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

    def place(self, model: Llama) -> PipelinedTorchTrainee:
        """See engine.Engine."""
        return PipelinedTorchTrainee(self, model)


class PipelinedTorchTrainee(TorchTrainee):
    """See engine.Trainee."""

    engine: PipelinedTorchEngine
    config: PipelineConfig
    roots: dict[Piece, Iterable[nn.Module]]  # type: ignore[assignment]

    def __init__(self, engine: PipelinedTorchEngine, model: Llama) -> None:
        super().__init__(engine, model)
        self.pipeline = Pipeline(
            self.config,
            engine.device_mesh["stage"],
            {piece.number: piece for piece in self.roots},
            engine.device,
            self.choose_collectives,
            self.step.add_gradients,
        )

    def divide(self) -> dict[nn.Module, Iterable[nn.Module]]:
        """See TorchTrainee. Leaves this stage's part of the model, and returns its pieces."""
        stage = self.engine.device_mesh["stage"].get_local_rank()
        keep_stage(self.config, self.model, stage)
        numbers = pieces_of(self.config, stage)
        divided = [Piece(self.config, self.model, number, self.blocks, self.read_inputs) for number in numbers]
        return {piece: piece.layers for piece in divided}

    def open_step(self, optimizer: Optimizer) -> TorchStep:
        """See TorchTrainee."""
        engine = self.engine
        return PipelinedStep(self.config, optimizer, engine.home, self.shards, engine.tensor_ranks, tied=engine.tied)

    def accumulate(self, batch: Batch) -> None:
        """See TorchTrainee. All micro-batches pass through the stages; the last stage counts loss and tokens."""
        on_device = self.to_device(batch)
        loss = self.pipeline.run(on_device)
        if self.pipeline.has_last:
            self.step.add_loss(loss, trained_tokens(on_device))

    def evaluated(self, batch: dict[str, Tensor]) -> Tensor:
        """See TorchTrainee."""
        loss = self.pipeline.forward(batch)
        return torch.zeros(2, device=self.engine.device) if loss is None else torch.stack((loss, trained_tokens(batch)))


class PipelinedStep(TorchStep):
    """See TorchStep."""

    def __init__(self, *arguments: Any, tied: TiedEmbedding | None) -> None:
        """tied: the embedding, where another stage has a copy of it."""
        self.tied = tied
        super().__init__(*arguments)

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
