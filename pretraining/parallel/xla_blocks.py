"""The Llama with its layers stacked, run by one scanned body: compile time does not grow with depth.

One parameter [layers, ...] stands for the same weight of every block; `scan` turns the blocks into one loop of the
compiled program. Selective checkpointing is a partition of that body's joint graph, because inside a scan
torch.utils.checkpoint is traced away without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.scan as xla_scan
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy

from pretraining.models.chunked import PRODUCTS
from pretraining.models.dropout import Noise, following
from pretraining.models.llama import Llama, Rope
from pretraining.noise import high
from pretraining.parallel.layout import Layout
from pretraining.parallel.recompute import ScanGroup
from pretraining.parallel.sharding import ACTIVATIONS, Activations, Spec, on_mesh

# Under SPMD the scan's backward ties gradients to their inputs with shard_as, which needs jax and torchax (and
# importing torchax breaks torch.distributed.checkpoint). We constrain the carried activation ourselves instead.
xla_scan.shard_as = lambda a, b: (a, b)

# x, cos, sin; for packed documents, segment ids; for dropout, its noise. All as floats, for a scan differentiates.
Carry = tuple[Tensor, ...]
Body = Callable[[Carry, dict[str, Tensor]], tuple[Carry, None]]


def stack_layers(model: Llama) -> Llama:
    """`model` with `model.layers` replaced by one block whose parameters are [layers, ...], on the meta device."""
    layers = len(model.model.layers)
    block = model.model.layers[0].to("meta")
    for module in block.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(layers, *weight.shape, device="meta"), weight.requires_grad))
    model.model.layers = block  # type: ignore[assignment]
    return model


class ScannedBlocks:
    """Runs the stacked blocks of a model; Llama.forward calls it in place of its own loop."""

    def __init__(
        self,
        block: nn.Module,
        groups: list[ScanGroup],
        modules: list[str],
        mesh: xs.Mesh,
        layout: Layout,
        kv_heads: int,
        repeats: int,
    ) -> None:
        self.groups = groups
        self.mesh, self.layout = mesh, layout
        self.kv_heads, self.repeats = kv_heads, repeats
        # A meta copy names the weights; the stacked ones are passed in at each call.
        self.names = [name for name, _ in block.named_parameters()]
        # scan caches its traced graphs by the identity of these functions: made once, not per step.
        self.bodies = {
            noisy: [self._body(block, len(group.mask), noisy) for group in self.groups] for noisy in (False, True)
        }
        marks = 1 + place_activations(block, ACTIVATIONS, mesh, layout)
        marks += 2 * sum(self._is_repeated(name) for name in self.names)
        for path in modules:
            bound(block.get_submodule(path))
        self.partitions = [_partition(group.mask, marks, selective=bool(modules)) for group in self.groups]

    def __call__(
        self, block: Iterable[nn.Module], x: Tensor, rope: Rope, segments: Tensor | None, noise: Noise | None
    ) -> Tensor:
        weights = dict(block.named_parameters())  # type: ignore[attr-defined]
        for spec in self._from_lookup():
            x = xs.mark_sharding_with_gradients(x, self.mesh, spec)
        packed = () if segments is None else (segments.float(),)
        carry: Carry = (x, rope.cos, rope.sin, *packed, *(() if noise is None else _as_floats(noise)))
        for group, body, partition in zip(self.groups, self.bodies[noise is not None], self.partitions, strict=True):
            stacks = {name: _grouped(weights[name], group) for name in self.names}
            carry, _ = xla_scan.scan(body, carry, stacks, partition_fn=partition, is_fn_pure=True)
        return carry[0]

    def _body(
        self, block: nn.Module, count: int, noisy: bool
    ) -> Callable[[Carry, dict[str, Tensor]], tuple[Carry, None]]:
        def body(carry: Carry, weights: dict[str, Tensor]) -> tuple[Carry, None]:
            x, *rest = carry
            cos, sin, *packed = (t.detach() for t in rest)
            noise = _from_floats(packed[-3:]) if noisy else None
            segments = packed[0] if len(packed) > 3 * noisy else None
            for i in range(count):
                # The marker both keeps the rows where they are and tells _partition where a block begins.
                x = xs.mark_sharding_with_gradients(x, self.mesh, self.layout.stream())
                layer = {name: self._used(name, weights[name][i]) for name in self.names}
                x = functional_call(block, layer, (x, Rope(cos, sin), segments, noise), strict=True)
                noise = following(noise)
            # The layer's number is the carry's last
            return (x, *rest[:-1], rest[-1] + count) if noisy else (x, *rest), None

        return body

    def _from_lookup(self) -> list[Spec]:
        """Where a looked-up activation goes, step by step, until it lies as the blocks take it.

        Where the embedding's columns are split, a lookup leaves them so; from there to rows is one all-to-all inside a
        shard group, and before it one to tokens inside a context group. Unsaid, or said in one step, the compiler
        replicates the whole activation ("involuntary full rematerialization"); with the last step left to the first
        block, the loop carries columns, and every block moves them to rows and back.
        """
        if not self.layout.split.parameters:
            return []
        steps: list[Spec] = [("replica", None, ("shard", "context")), ("replica", "context", "shard")]
        mesh = self.layout.mesh._asdict()
        placed = [on_mesh(spec, mesh) for spec in (steps if mesh["context"] > 1 else steps[1:])]
        return [*placed, self.layout.stream()]

    def _is_repeated(self, name: str) -> bool:
        return self.layout.repeated_heads and re.search(r"[kv]_proj\.(weight|bias|lora_B)", name) is not None

    def _used_spec(self, weight: Tensor) -> Spec:
        return (None if self.layout.whole_heads else "tensor", *(None,) * (weight.dim() - 1))

    def _used(self, name: str, weight: Tensor) -> Tensor:
        """`weight`; of keys and values, with each head as often as tensor ranks use it."""
        if not self._is_repeated(name):
            return weight
        # First whole on every rank: in one step the compiler finds no way from columns to copied heads.
        weight = xs.mark_sharding_with_gradients(weight, self.mesh, (None,) * weight.dim())
        heads = weight.unflatten(0, (self.kv_heads, -1)).repeat_interleave(self.repeats, 0).flatten(0, 1)
        return xs.mark_sharding_with_gradients(heads, self.mesh, self._used_spec(weight))


def _as_floats(noise: Noise) -> tuple[Tensor, ...]:
    """Halves of 16 bits, which fp32 holds exactly, and the layer."""
    return high(noise.cells, 16).float(), (noise.cells & 0xFFFF).float(), noise.layer.float()


def _from_floats(parts: Sequence[Tensor]) -> Noise:
    high, low, layer = (part.int() for part in parts)
    return Noise((high << 16) | low, layer)


def place_activations(root: nn.Module, table: Activations, mesh: xs.Mesh, layout: Layout) -> int:
    """Hold what the modules of `table` take and give where it says; the number of modules."""
    placed = 0
    present = [
        row for row in layout.activations(table) if row[0] in dict(root.named_modules())
    ]  # not every feed-forward has a gate
    for name, side, spec in present:
        module, wanted = root.get_submodule(name), layout.of_module(name, spec)
        if side == "input":
            module.register_forward_pre_hook(lambda _, given, w=wanted: (_held(given[0], mesh, w), *given[1:]))
        else:
            module.register_forward_hook(lambda _, __, out, w=wanted: _held(out, mesh, w))
        placed += 1
    return placed


@torch.library.custom_op("pretraining::boundary", mutates_args=())
def boundary(x: Tensor) -> Tensor:
    """`x`: where a module that is recomputed by itself begins or ends, seen in a traced graph."""
    return x.clone()


boundary.register_fake(torch.empty_like)
boundary.register_autograd(lambda _, grad: grad)


def bound(module: nn.Module) -> None:
    """Mark in a traced graph where `module` begins and ends."""
    module.register_forward_pre_hook(lambda _, given: (boundary(given[0]), *given[1:]))
    module.register_forward_hook(lambda _, __, out: boundary(out))


def _held(x: Tensor, mesh: xs.Mesh, spec: Spec) -> Tensor:
    return xs.mark_sharding_with_gradients(x, mesh, spec)


def _grouped(stack: Tensor, group: ScanGroup) -> Tensor:
    """[layers, ...] -> [repeats, blocks per body, ...] of this group's layers."""
    size = len(group.mask)
    layers = stack[group.start : group.start + group.repeats * size]
    return layers.view(group.repeats, size, *stack.shape[1:])


def _partition(
    mask: tuple[bool, ...], marks: int, *, selective: bool
) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
    """A partitioner that keeps every activation of the blocks where `mask` is False and recomputes the others.

    A block has `marks` sharding markers, the first at its beginning. selective: of a chosen block, what lies between
    two boundaries is recomputed; of its rest, the min-cut decides.

    With no block chosen the min-cut decides alone: it recomputes what is cheap beside its memory (casts, norms, masks)
    and never a matrix product, which was faster on CPUs than keeping everything.

    Attention's scores are recomputed in every block: the backward pass computes them again as the forward pass did, so
    the joint graph has them once, and the partition would keep them, [queries, keys] for each head.
    """
    unchosen = CheckpointPolicy.MUST_SAVE if any(mask) else None

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        seen = bounds = 0
        scores = False
        for node in joint.graph.nodes:
            if node.op != "call_function":
                continue
            seen += "mark_sharding" in str(node.target)
            bounds += "boundary" in str(node.target)
            scores = _of_scores(node, scores)
            block = (seen - 1) // marks
            if block == len(mask):
                break  # the backward's own markers follow
            if block < 0:
                continue
            recomputed = mask[block] and (bounds % 2 == 1 or not selective)
            policy = None if mask[block] else unchosen
            if recomputed or (scores and node.meta["val"].shape[-1] > 1) or getattr(node.target, "is_view", False):
                policy = CheckpointPolicy.MUST_RECOMPUTE
            if policy:
                node.meta["recompute"] = policy
                node.meta["ac_graph_id"] = block
        return min_cut_rematerialization_partition(joint, inputs, **options)

    return partition


def _of_scores(node: fx.Node, before: bool) -> bool:
    """Whether `node` is one of those that make a piece's probabilities of q and k; `before`: whether the last was."""
    if "contract" not in str(node.target):
        return before
    return node.args[0] == PRODUCTS
