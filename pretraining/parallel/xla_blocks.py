"""The Llama with its layers stacked, run by one scanned body: compile time does not grow with depth.

One parameter [layers, ...] stands for the same weight of every block; `scan` turns the blocks into one loop of the
compiled program. Selective checkpointing is a partition of that body's joint graph, because inside a scan
torch.utils.checkpoint is traced away without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.scan as xla_scan
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy

from pretraining.models.llama import Llama, Rope
from pretraining.parallel.recompute import ScanGroup, scan_plan
from pretraining.parallel.sharding import BATCH_AXES

# Under SPMD the scan's backward ties gradients to their inputs with shard_as, which needs jax and torchax (and
# importing torchax breaks torch.distributed.checkpoint). We constrain the carried activation ourselves instead.
xla_scan.shard_as = lambda a, b: (a, b)

Carry = tuple[Tensor, ...]  # x, cos, sin and, for packed documents, segment ids as floats


def stack_layers(model: Llama) -> Llama:
    """`model` with `model.layers` replaced by one block whose parameters are [layers, ...], on the meta device."""
    layers = len(model.model.layers)
    block = model.model.layers[0].to("meta")
    for module in block.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(layers, *weight.shape, device="meta")))
    model.model.layers = block  # type: ignore[assignment]
    return model


class ScannedBlocks:
    """Runs the stacked blocks of a model; Llama.forward calls it in place of its own loop."""

    def __init__(self, block: nn.Module, mask: tuple[bool, ...], mesh: xs.Mesh) -> None:
        self.groups = scan_plan(mask)
        self.mesh = mesh
        # A meta copy names the weights; the stacked ones are passed in at each call.
        self.names = [name for name, _ in block.named_parameters()]
        # scan caches its traced graphs by the identity of these functions: made once, not per step.
        self.bodies = [self._body(block, len(group.mask)) for group in self.groups]
        self.partitions = [_partition(group.mask) for group in self.groups]

    def __call__(self, block: Iterable[nn.Module], x: Tensor, rope: Rope, segments: Tensor | None) -> Tensor:
        weights = dict(block.named_parameters())  # type: ignore[attr-defined]
        # The embedding's columns are split, so a lookup leaves them so; from here to rows is one all-to-all inside a
        # shard group. Unsaid, hsdp replicates the whole activation ("involuntary full rematerialization").
        x = xs.mark_sharding_with_gradients(x, self.mesh, ("replica", None, "shard"))
        carry: Carry = (x, rope.cos, rope.sin) + (() if segments is None else (segments.float(),))
        for group, body, partition in zip(self.groups, self.bodies, self.partitions, strict=True):
            stacks = {name: _grouped(weights[name], group) for name in self.names}
            carry, _ = xla_scan.scan(body, carry, stacks, partition_fn=partition, is_fn_pure=True)
        return carry[0]

    def _body(self, block: nn.Module, count: int) -> Callable[[Carry, dict[str, Tensor]], tuple[Carry, None]]:
        def body(carry: Carry, weights: dict[str, Tensor]) -> tuple[Carry, None]:
            x, *rest = carry
            cos, sin, *packed = (t.detach() for t in rest)
            for i in range(count):
                # The marker both keeps the rows where they are and tells _partition where a block begins.
                x = xs.mark_sharding_with_gradients(x, self.mesh, (BATCH_AXES, None, None))
                layer = {name: weights[name][i] for name in self.names}
                x = functional_call(block, layer, (x, Rope(cos, sin), *packed), strict=True)
            return (x, *rest), None

        return body


def _grouped(stack: Tensor, group: ScanGroup) -> Tensor:
    """[layers, ...] -> [repeats, blocks per body, ...] of this group's layers."""
    size = len(group.mask)
    layers = stack[group.start : group.start + group.repeats * size]
    return layers.view(group.repeats, size, *stack.shape[1:])


def _partition(mask: tuple[bool, ...]) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
    """A partitioner that keeps every activation of the blocks where `mask` is False and recomputes the others.

    With no block chosen the min-cut decides alone: it recomputes what is cheap beside its memory (casts, norms, masks)
    and never a matrix product, which was faster on CPUs than keeping everything.
    """
    if not any(mask):
        return min_cut_rematerialization_partition

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        policies = [CheckpointPolicy.MUST_RECOMPUTE if chosen else CheckpointPolicy.MUST_SAVE for chosen in mask]
        block = -1
        for node in joint.graph.nodes:
            if node.op != "call_function":
                continue
            block += "mark_sharding" in str(node.target)
            if block == len(mask):
                break  # the backward's own markers follow
            if block >= 0:
                node.meta["recompute"] = policies[block]
                node.meta["ac_graph_id"] = block
        return min_cut_rematerialization_partition(joint, inputs, **options)

    return partition
