"""The pipeline of the torch engine: a schedule of torch.distributed.pipelining runs the micro-batches of a step.

A stage is a group of processes with the layers of its pieces, which FSDP2 and tensor ranks shard as without stages.
The residual stream and its gradient are sent between neighbouring stages; the rest of a micro-batch (labels, positions,
segments, token indices) is fed to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from pretraining.config.variants import model_shape
from pretraining.extensions.pipeline.settings import PipelineConfig
from pretraining.extensions.pipeline.stages import (
    layers_of_stage,
    outer_modules,
    pieces,
    pieces_of,
    schedule_of,
)
from pretraining.models.llama import BatchInputs, Llama
from pretraining.models.ops import LossAndGradient
from pretraining.optim.precision import precision_of
from pretraining.parallel.torch.blocks import TorchBlocks

# Tensors of a micro-batch -> what the model reads of them, and how a chunk of the logits becomes a loss
ReadInputs = Callable[[dict[str, Tensor]], tuple[BatchInputs, LossAndGradient]]

# Called with a piece and whether this is its last backward pass of the step
BeforeBackward = Callable[[nn.Module, bool], None]


class Piece(nn.Module):
    """Consecutive blocks of a model; the first piece has the embedding, the last one norm, head and loss, too."""

    def __init__(
        self, config: PipelineConfig, model: Llama, number: int, blocks: TorchBlocks, read: ReadInputs
    ) -> None:
        super().__init__()
        divided = pieces(config)
        self.number = number
        self.is_first, self.is_last, self.first_layer = number == 0, number == len(divided) - 1, divided[number][0]
        self.layers = nn.ModuleList(model.model.layers.get_submodule(str(layer)) for layer in divided[number])
        self.ends = nn.ModuleList(model.get_submodule(path) for path in outer_modules(config, [number]))
        self._model = [model]  # in a list, because not all of it is in this piece
        self._blocks, self._read = blocks, read

    def forward(self, x: Tensor, **batch: Tensor) -> Tensor:
        """Return the residual stream after the piece, or after the last piece the summed loss, [1].

        x: the tokens [B, T], or the residual stream before the piece [B, T, D], with sequence_parallel this tensor
        rank's tokens of it. batch: the rest of a micro-batch, [B, T] each.
        """
        (model,), (inputs, chunk_loss), labels = self._model, self._read(batch), batch["labels"].long()
        if self.is_first:
            x = self._blocks.enter(model.embed(x, inputs))
        x = self._blocks.run(self.layers, x, model.with_rope(labels, inputs), self.first_layer)
        if not self.is_last:
            return x
        x = model.model.norm(self._blocks.leave(x))
        # stack: a view of the loss would keep the activations until the next step
        return torch.stack((model.loss_of_hidden(x, labels, chunk_loss),))


def keep_stage(config: PipelineConfig, model: Llama, stage: int) -> None:
    """Remove from `model` what the pieces of other stages run; parameters keep their names."""
    kept = nn.ModuleList()
    for layer in layers_of_stage(config, stage):
        kept.add_module(str(layer), model.model.layers[layer])
    model.model.layers = kept
    everything = outer_modules(config, list(range(len(pieces(config)))))
    for path in set(everything) - set(outer_modules(config, pieces_of(config, stage))):
        parent, _, name = path.rpartition(".")
        delattr(model.get_submodule(parent), name)


class EngineSynced(nn.Module):
    """A piece whose collectives the engine controls: torch's stages recognise FSDP's modules by their type."""

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self.piece = piece

    def forward(self, x: Tensor, **batch: Tensor) -> Tensor:
        """See Piece."""
        return self.piece(x, **batch)


class Stage(PipelineStage):
    """A piece in torch's schedule."""

    before_backward: BeforeBackward
    after_backward: Callable[[], None]
    local: Mapping[int, Stage]  # the pieces of this process; tensors between two of them are handed over

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return no handshake: torch 2.9 sends int64 where it receives float32, at which gloo ends the process."""
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return how the input of a micro-batch arrives."""
        return [] if self.stage_index - 1 in self.local else super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return how the gradient of the output arrives."""
        return [] if self.stage_index + 1 in self.local else super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return how the output leaves."""
        if self.stage_index + 1 not in self.local:
            return super().get_fwd_send_ops(fwd_chunk_id)
        self.local[self.stage_index + 1].set_local_fwd_input(self.fwd_cache[fwd_chunk_id][0], fwd_chunk_id)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return how the gradient of the input leaves."""
        if self.stage_index - 1 not in self.local:
            return super().get_bwd_send_ops(bwd_chunk_id)
        self.local[self.stage_index - 1].set_local_bwd_input(self.get_local_bwd_output(bwd_chunk_id), bwd_chunk_id)
        return []

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward pass of one micro-batch."""
        assert isinstance(self.submod, EngineSynced)
        self.before_backward(self.submod.piece, last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.after_backward()


class Pipeline:
    """The pieces of this process's stage, and the schedule that runs them."""

    def __init__(
        self,
        config: PipelineConfig,
        ranks: DeviceMesh,
        own: dict[int, Piece],
        device: torch.device,
        before_backward: BeforeBackward,
        after_backward: Callable[[], None],
    ) -> None:
        """ranks: one of each stage. own: the pieces of this stage, by number, placed. The functions are Stage's."""
        self.config, self.group, self.stage = config, ranks.get_group(), ranks.get_local_rank()
        self.pieces, self.count = own, len(pieces(config))
        self.has_first, self.has_last = 0 in own, self.count - 1 in own
        self._tokens = config.seq_length // config.context_parallel_size
        streamed = self._tokens // (config.tensor_parallel_size if config.sequence_parallel else 1)
        self._stream_shape = (config.batch_size, streamed, model_shape(config).hidden_size)
        self._stream_dtype = precision_of(config).activations
        self._stages, self._schedules = dict[int, Stage](), dict[int, Any]()
        for number, piece in self.pieces.items():
            incoming, outgoing = self._examples(piece)
            module, group = EngineSynced(piece), self.group
            stage = Stage(module, number, self.count, device, input_args=incoming, output_args=outgoing, group=group)
            stage.before_backward, stage.after_backward = before_backward, after_backward
            stage.local = self._stages
            self._stages[number] = stage

    def _schedule(self, micro_batches: int) -> Any:
        """Return torch's schedule of a step with so many micro-batches, of which growing global batches have more."""
        if micro_batches not in self._schedules:
            kind: Any = get_schedule_class(schedule_of(self.config))
            self._schedules[micro_batches] = kind(
                list(self._stages.values()) if issubclass(kind, PipelineScheduleMulti) else self._stages[self.stage],
                n_microbatches=micro_batches,
                loss_fn=lambda output, _: output.sum(),
                scale_grads=False,
            )
        return self._schedules[micro_batches]

    def _examples(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Return tensors like the input and the output of a piece, on the meta device."""
        tokens = torch.empty(self.config.batch_size, self._tokens, dtype=torch.int32, device="meta")
        stream = torch.empty(self._stream_shape, dtype=self._stream_dtype, device="meta", requires_grad=True)
        loss = torch.empty(1, device="meta", requires_grad=True)
        return tokens if piece.is_first else stream, loss if piece.is_last else stream

    def run(self, batch: dict[str, Tensor]) -> Tensor:
        """Run forward and backward passes of a step's micro-batches, [rows, T] each.

        Returns their summed loss, or 0 without the last piece.
        """
        losses: list[Tensor] = []
        rest = {name: tensor for name, tensor in batch.items() if name != "tokens"}
        target = {"target": batch["labels"], "losses": losses} if self.has_last else {}
        schedule = self._schedule(len(batch["labels"]) // self.config.batch_size)
        schedule.step(*([batch["tokens"]] * self.has_first), **rest, **target)
        return sum((loss.detach() for loss in losses), batch["labels"].new_zeros((), dtype=torch.float32))

    def forward(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Return the loss of one micro-batch, None without the last piece; one piece after the other, no gradients.

        torch's schedules do not serve: in torch 2.9, one that has evaluated cannot train.
        """
        rest = {name: tensor for name, tensor in batch.items() if name != "tokens"}
        x = batch["tokens"]
        for number, piece in self.pieces.items():
            before, after = (self._peer(other) for other in (number - 1, number + 1))
            if before is not None:
                x = torch.empty(self._stream_shape, dtype=self._stream_dtype, device=x.device)
                dist.recv(x, before, self.group)
            x = piece(x, **rest)
            if after is not None:
                dist.send(x.contiguous(), after, self.group)
        return x.sum() if self.has_last else None

    def _peer(self, number: int) -> int | None:
        """Return the process that has the piece of this number; None if it is this one, or there is no such piece."""
        if not 0 <= number < self.count or number in self.pieces:
            return None
        return dist.get_global_rank(self.group, number % self.config.pipeline_parallel_size)
