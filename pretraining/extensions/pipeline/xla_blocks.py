"""The pipeline of the XLA engine: stages are one more axis of the mesh, and all of them run one program.

The stack of layers is sharded along `stage`. A tick runs one piece of layers on every stage, each on a micro-batch of
its own; between ticks, a collective-permute moves what every stage made to the next one. One scan over the ticks is the
step's forward pass, and one its backward pass, so that compile time depends neither on layers nor on micro-batches.

Micro-batches wait in a queue, sharded over the stages like rows over data-parallel ranks, which is how embedding, head
and loss are computed. Groups of S micro-batches go through the S stages as often as a stage has pieces (the interleaved
order of Narayanan et al. 2021).
Shapes: S stages, V pieces of a stage, L layers of a piece, R data-parallel ranks, J micro-batches of b rows for each of
them and stage, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.scan as xla_scan
from torch import Tensor, nn

from pretraining.extensions.pipeline.settings import PipelineConfig
from pretraining.extensions.pipeline.stages import pieces, stacked_layers, ticks
from pretraining.extensions.pipeline.xla_weights import StagedBlocks
from pretraining.models.chunked import contract
from pretraining.models.llama import BatchInputs
from pretraining.models.ops import LossOptions, loss_and_gradient
from pretraining.optim.precision import precision_of
from pretraining.parallel.layout import STACK
from pretraining.parallel.recompute import ScanGroup
from pretraining.parallel.sharding import LOGITS, REPLICAS, on_mesh
from pretraining.parallel.xla.blocks import layers_of, to_floats


class TracedGroup(NamedTuple):
    """The passes over one group of layers, as scan splits them. Activations are what the forward pass keeps."""

    group: ScanGroup
    forward: Callable[..., Any]
    with_inputs: Callable[..., Any]  # activations -> the same with those that are the layers' weights
    backward: Callable[..., Any]


class PipelinedBlocks:
    """Runs the stacked blocks on all micro-batches of a step, x [S R J b, T, D]. See llama.RunBlocks."""

    def __init__(self, config: PipelineConfig, blocks: StagedBlocks) -> None:
        self.blocks, self.mesh, self.layout = blocks, blocks.mesh, blocks.layout
        self.stages, self.pieces = config.pipeline_parallel_size, config.virtual_pipeline_size
        self.config, self.lines, self.ticks = config, 0, 0  # of the step that is traced, whose size may grow
        self.sum_dtype = precision_of(config).gradients
        layers = stacked_layers(config)
        self.is_layer = None if None not in layers else torch.tensor([layer is not None for layer in layers])
        self.first_layers = torch.tensor([piece[0] for piece in pieces(config)]).view(self.pieces, self.stages)

    def __call__(self, block: Iterable[nn.Module], x: Tensor, inputs: BatchInputs) -> Tensor:
        self.lines = len(x) // (self.stages * self.layout.mesh.data_ranks * self.config.batch_size)
        self.ticks = ticks(replace(self.config, gradient_accumulation_steps=self.lines * self.stages))
        weights = dict(block.named_parameters())  # type: ignore[attr-defined]
        if x.requires_grad and self.layout.split.moments and not self.layout.split.parameters:
            x.register_hook(self._by_columns)
        for spec in self.blocks.lookup_to_stream():
            x = xs.mark_sharding_with_gradients(x, self.mesh, spec)
        rest = to_floats(inputs._replace(noise=None))
        has_own_positions = inputs.positions is not None and inputs.positions.dim() > 1
        shared, riders = ((), rest) if has_own_positions else (rest[:2], rest[2:])
        if inputs.noise is not None:
            riders = (*riders, *to_floats(inputs)[len(rest) : -1])  # without the layer
        stacks = {name: self._by_piece(weights[name]) for name in self.blocks.names}
        queues = [self.in_lines(rows) for rows in (x, *riders)]
        trained = [name for name in stacks if weights[name].requires_grad]
        run = PipelineContext(self, queues, list(shared), stacks, trained, has_dropout=inputs.noise is not None)
        queue: Tensor = _Ticks.apply(run, queues[0], *stacks.values())
        rows = queue.unflatten(1, (self.stages, self.layout.mesh.data_ranks, -1)).movedim(0, 2).flatten(0, 3)
        return xs.mark_sharding_with_gradients(rows, self.mesh, self.layout.stream())

    def head_loss(self, x: Tensor, weight: Tensor, labels: Tensor, vocabulary: int, options: LossOptions) -> Tensor:
        """Return the summed loss; the logits of one micro-batch of every stage exist at a time."""
        loss: Tensor = _HeadLoss.apply(self, self.in_lines(x), weight, self.in_lines(labels), vocabulary, options)
        return loss

    def _by_columns(self, grad: Tensor) -> Tensor:
        """Shard the gradient of looked-up rows along columns, as zero1 and zero2 update the embedding.

        One all-to-all inside a shard group; left to the compiler, which must also gather the rows of the stages, it
        replicates them all ("involuntary full rematerialization").
        """
        spec = on_mesh((REPLICAS, "context", "shard"), self.layout.mesh._asdict())
        return xs.mark_sharding_with_gradients(grad, self.mesh, spec)

    def _by_piece(self, stack: Tensor) -> Tensor:
        """[S V L, ..] -> [V, L, S, ..]; the weights of padding are zero, which makes it an identity."""
        if self.is_layer is not None:
            is_layer = self.is_layer.to(stack.device).view(-1, *(1,) * (stack.dim() - 1))
            stack = torch.where(is_layer, stack, torch.zeros((), dtype=stack.dtype, device=stack.device))
        return stack.unflatten(0, (self.stages, self.pieces, -1)).movedim(0, 2)

    def in_lines(self, rows: Tensor) -> Tensor:
        """[S R J b, ..] -> [J, S R b, ..]: line j has the j-th micro-batch of every stage."""
        lines = rows.unflatten(0, (self.stages, self.layout.mesh.data_ranks, self.lines, -1))
        return self.mark_rows(lines.movedim(2, 0).flatten(1, 3), dim=1)

    def mark_rows(self, x: Tensor, dim: int = 0) -> Tensor:
        """Shard dimension `dim`, rows, and the next one, tokens, like the residual stream."""
        spec = (*(None,) * dim, *self.layout.stream()[:2])
        return xs.mark_sharding_with_gradients(x, self.mesh, (*spec, *(None,) * (x.dim() - len(spec))))

    def mark_gradient(self, gradient: Tensor, name: str) -> Tensor:
        """Shard the gradient [V, L, S, ..] of a stack as the layout does."""
        spec = self.layout.gradient(f"{STACK}{name}")
        return xs.mark_sharding_with_gradients(gradient, self.mesh, (None, None, "stage", *spec))

    def shift(self, x: Tensor, by: int) -> Tensor:
        """Move the rows of every stage to the stage `by` further, 1 or -1."""
        return self.mark_rows(_Shift.apply(x.unflatten(0, (self.stages, -1)), by).flatten(0, 1))

    def exchange(self, queues: list[Tensor], made: list[Tensor], tick: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the queues and the inputs of a tick, given what the stages made in the tick before.

        Where a group of micro-batches begins, the first stage takes its micro-batch of a line and leaves what has been
        through all pieces; then the line moves on by a stage, so that the next micro-batch is there.
        """
        group, place = tick // self.stages, tick % self.stages
        is_entering = group % self.pieces == 0
        line = (group // self.pieces * self.stages + place) % self.lines
        kept, inputs = [], []
        for queue, rows in zip(queues, made, strict=True):
            ones = (1,) * (rows.dim() - 1)
            is_first = (torch.arange(len(rows), device=rows.device) < len(rows) // self.stages).view(-1, *ones)
            is_line = (torch.arange(self.lines, device=rows.device) == line).view(-1, 1, *ones)
            arriving, waiting = self.shift(rows, 1), torch.where(is_line, queue, 0).sum(0).to(queue.dtype)
            inputs.append(self.mark_rows(torch.where(is_first & is_entering, waiting, arriving)))
            moved = self.shift(torch.where(is_first, arriving, waiting), -1)
            kept.append(self.mark_rows(torch.where(is_line & is_entering, moved, queue), dim=1))
        return kept, inputs

    def piece_of(self, tick: Tensor) -> Tensor:
        """Return the piece that each stage runs in this tick, as a mask [V, S]."""
        stage = torch.arange(self.stages, device=tick.device)
        piece = (tick - stage).clamp(min=0) // self.stages % self.pieces
        return piece == torch.arange(self.pieces, device=tick.device)[:, None]


class PipelineContext:
    """What a pass through the pipeline needs besides the queue and the weights."""

    def __init__(
        self,
        pipeline: PipelinedBlocks,
        queues: list[Tensor],
        shared: list[Tensor],
        stacks: dict[str, Tensor],
        trained: list[str],
        has_dropout: bool,
    ) -> None:
        """queues: [J, S R b, ..], of the residual stream and of what travels with its rows; shared: of all rows."""
        self.pipeline, self.riders, self.shared = pipeline, queues[1:], shared
        self.trained, self.has_dropout = trained, has_dropout
        blocks = pipeline.blocks
        carry = self.carry([torch.empty_like(queue[0]) for queue in queues], shared, None)
        like = {name: torch.empty_like(stack[0]).requires_grad_(name in trained) for name, stack in stacks.items()}
        self.groups = [
            TracedGroup(
                group,
                *xla_scan.value_and_grad_partitioned(
                    body, carry, {name: layers_of(stack, group) for name, stack in like.items()}, partition_fn=partition
                ),
            )
            for group, body, partition in zip(blocks.groups, blocks.bodies[has_dropout], blocks.partitions, strict=True)
        ]

    def carry(self, rows: list[Tensor], shared: list[Tensor], is_piece: Tensor | None) -> tuple[Tensor, ...]:
        """Return what the scan over layers carries; with dropout the first layer of each stage's piece is the last."""
        x, *riders = rows
        carry = (x, *shared, *riders)
        if not self.has_dropout:
            return carry
        if is_piece is None:
            layer = x.new_zeros(self.pipeline.stages, dtype=torch.float32)
        else:
            layer = torch.where(is_piece, self.pipeline.first_layers.to(x.device), 0).sum(0).float()
        return (*carry, layer.repeat_interleave(len(x) // len(layer)).view(-1, 1))

    def select(self, stacks: list[Tensor], is_piece: Tensor) -> dict[str, Tensor]:
        """[V, L, S, ..] -> [L, S, ..]: the layers that each stage runs in a tick."""
        by_name = dict(zip(self.pipeline.blocks.names, stacks, strict=True))
        if len(is_piece) == 1:
            return {name: stack[0] for name, stack in by_name.items()}
        return {name: torch.where(_of_stage(is_piece, stack), stack, 0).sum(0) for name, stack in by_name.items()}

    def forward(self, carry: tuple[Tensor, ...], weights: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
        """Run a piece on every stage; return the residual stream and the activations of each group."""
        kept = []
        for traced in self.groups:
            layers = {name: layers_of(weight, traced.group) for name, weight in weights.items()}
            carry, (_, activations) = xla_scan._scan_impl_pytree(traced.forward, carry, layers)
            kept.append(activations)
        return carry[0], kept

    def backward(
        self, grads: tuple[Tensor, ...], kept: list[Any], weights: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradients of a piece's input and of its trained weights [L, S, ..]."""
        by_group: list[dict[str, Tensor]] = []
        for traced, activations in reversed(list(zip(self.groups, kept, strict=True))):
            layers = {name: layers_of(weight, traced.group) for name, weight in weights.items()}
            inputs = (None, traced.with_inputs(activations, layers))
            grads, by_layer = xla_scan._scan_impl_pytree(traced.backward, grads, inputs, reverse=True)
            by_group.insert(0, {name: grad.flatten(0, 1) for name, grad in by_layer.items() if grad is not None})
        return grads[0], {name: torch.cat([grads[name] for grads in by_group]) for name in by_group[0]}


def _of_stage(is_piece: Tensor, stack: Tensor) -> Tensor:
    """[V, S] -> [V, 1, S, 1, ..], as it broadcasts with a stack [V, L, S, ..]."""
    return is_piece.unsqueeze(1).view(len(is_piece), 1, -1, *(1,) * (stack.dim() - 3))


class _Shift(torch.autograd.Function):
    """x [S, ..] moved `by` stages further."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by = by
        return _moved(x, by)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _moved(grad, -ctx.by), None


def _moved(x: Tensor, by: int) -> Tensor:
    """Return x [S, ..] moved `by` stages further: one collective-permute, where torch.roll is seven.

    The compiler recognizes two slices of one value. Without the barrier, a TPU's looks through that value into what
    made it, and gathers the rows of all devices (llama3_8b, 4 stages on a v6e:4x4: 11 GB a step).
    """
    x = x.clone()
    torch_xla._XLAC._xla_optimization_barrier_([x])
    return torch.cat((x[-by:], x[:-by]))


class _Ticks(torch.autograd.Function):
    """The queue [J, S R b, T, D] before and after all ticks. The layers' activations of every tick are kept."""

    @staticmethod
    def forward(ctx: Any, run: PipelineContext, queue: Tensor, *stacks: Tensor) -> Tensor:
        pipeline = run.pipeline

        def tick(carry: Any, number: Tensor) -> Any:
            queues, made, shared, stacks = carry
            queues, inputs = pipeline.exchange(queues, made, number)
            is_piece = pipeline.piece_of(number)
            x, kept = run.forward(run.carry(inputs, shared, is_piece), run.select(stacks, is_piece))
            return (queues, [x, *inputs[1:]], shared, stacks), kept

        queues = [queue, *run.riders]
        empty = [pipeline.mark_rows(torch.zeros_like(one[0])) for one in queues]
        numbers = torch.arange(pipeline.ticks + 1, device=queue.device, dtype=torch.int32)
        carry, ctx.kept = xla_scan._scan_impl_pytree(tick, (queues, empty, run.shared, list(stacks)), numbers[:-1])
        queues, made, *_ = carry
        (queue, *_), _ = pipeline.exchange(queues, made, numbers[-1])
        ctx.run, ctx.numbers = run, numbers
        ctx.save_for_backward(*stacks)
        return queue.roll(-pipeline.stages, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        run, stacks, numbers = ctx.run, list(ctx.saved_tensors), ctx.numbers
        pipeline: PipelinedBlocks = run.pipeline

        def through_exchange(grads: tuple[Tensor, Tensor], number: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                zeros = [torch.zeros_like(one).requires_grad_() for one in grads]
                queues, inputs = pipeline.exchange(zeros[:1], zeros[1:], number)
                return torch.autograd.grad((queues[0], inputs[0]), zeros, grads)

        def tick(carry: Any, of_tick: Any) -> Any:
            (grad_queue, grad_made), sums, stacks = carry
            number, kept = of_tick
            is_piece = pipeline.piece_of(number)
            others = [torch.zeros_like(one[0]) for one in run.riders]
            grads = run.carry([grad_made, *others], [torch.zeros_like(one) for one in run.shared], None)
            grad_x, by_name = run.backward(grads, kept, run.select(stacks, is_piece))
            added = {
                name: pipeline.mark_gradient(
                    total + torch.where(_of_stage(is_piece, total), by_name[name], 0).to(total.dtype), name
                )
                for name, total in sums.items()
            }
            return (through_exchange((grad_queue, grad_x), number), added, stacks), None

        grad = grad.roll(pipeline.stages, 0)
        first = through_exchange((grad, torch.zeros_like(grad[0])), numbers[-1])
        by_name = dict(zip(pipeline.blocks.names, stacks, strict=True))
        sums = {
            name: pipeline.mark_gradient(torch.zeros_like(by_name[name], dtype=pipeline.sum_dtype), name)
            for name in run.trained
        }
        begun = (first, sums, stacks)
        carry, _ = xla_scan._scan_impl_pytree(tick, begun, (numbers[:-1], ctx.kept), reverse=True)
        (grad_queue, _), sums, *_ = carry
        return None, grad_queue, *(sums.get(name) for name in pipeline.blocks.names)


class _HeadLoss(torch.autograd.Function):
    """The summed loss of x [J, rows, T, D], a line at a time; the gradient as ops.head_loss computes it."""

    @staticmethod
    def forward(
        ctx: Any,
        pipeline: PipelinedBlocks,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocabulary: int,
        options: LossOptions,
    ) -> Tensor:
        mesh, layout = pipeline.mesh, pipeline.layout
        logits_spec, weight_spec = layout.activation(LOGITS), layout.gradient("lm_head.weight")

        def line(carry: Any, rows: Any) -> Any:
            loss, grad_weight, weight = carry
            x, labels = rows
            narrow = weight.to(x.dtype)
            logits = xs.mark_sharding_with_gradients(contract("btd,vd->btv", x, narrow), mesh, logits_spec)
            of_line, grad = loss_and_gradient(logits, labels, vocabulary, options=options)
            by_weight = contract("btv,btd->vd", grad.float(), x.float())
            grad_weight = xs.mark_sharding_with_gradients(grad_weight + by_weight, mesh, weight_spec)
            return (loss + of_line, grad_weight, weight), pipeline.mark_rows(contract("btv,vd->btd", grad, narrow))

        begun = (torch.zeros((), device=x.device), torch.zeros_like(weight, dtype=torch.float32), weight)
        (loss, grad_weight, _), grad_x = xla_scan._scan_impl_pytree(line, begun, (x, labels))
        ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        return None, grad_x * grad.to(grad_x.dtype), grad_weight * grad.to(grad_weight.dtype), None, None, None
