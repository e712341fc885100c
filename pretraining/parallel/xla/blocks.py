"""Llama with stacked layers, run by one scanned body: compile time does not grow with depth.

One parameter [layers, ...] stands for the same weight of every block, and `scan` makes the blocks one loop of the
compiled program. Selective activation checkpointing is a partition of that body's joint graph, because inside a scan
torch.utils.checkpoint is traced away without a warning.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.debug.profiler as xla_profiler
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.scan as xla_scan
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy
from torch_xla.distributed.spmd import xla_sharding

from pretraining.config.training import TrainConfig
from pretraining.models.chunked import PRODUCTS, contract
from pretraining.models.dropout import DropoutNoise
from pretraining.models.llama import BatchInputs, Linear, Llama, Rope
from pretraining.models.ops import Kernel, linear
from pretraining.noise import upper_bits
from pretraining.optim.precision import precision_of
from pretraining.parallel.layout import STACK, XlaLayout
from pretraining.parallel.mesh import kv_repeats
from pretraining.parallel.recompute import ScanGroup, block_mask, scan_plan
from pretraining.parallel.sharding import ACTIVATIONS, KERNEL_ACTIVATIONS, REPLICAS, Activations, Spec, on_mesh

# Under SPMD the scan's backward ties gradients to their inputs with shard_as, which needs jax and torchax (and
# importing torchax breaks torch.distributed.checkpoint). We constrain the carried activation ourselves instead.
xla_scan.shard_as = lambda a, b: (a, b)

# Every mark_sharding looks for torchax, whose failing import takes 2.3 ms (some sixty of them per step); it and scan's
# traces import jax where it is installed. Neither is used.
xla_sharding.maybe_get_torchax = xla_sharding.maybe_get_jax = xla_profiler.maybe_get_jax = lambda log=True: None
# A mark makes a mesh of its text, and torch-xla's cache of shardings keeps each: 29 for every batch of a validation.
xs.Mesh.from_str = cache(xs.Mesh.from_str)

# Carry of the scan: x, cos, sin; for packed documents, segment ids; for dropout, hashes in two halves and the layer.
# All are floats, because scan differentiates every carry.
Carry = tuple[Tensor, ...]
Body = Callable[[Carry, dict[str, Tensor]], tuple[Carry, None]]
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def stack_layers(model: Llama, layers: int) -> Llama:
    """Replace `model.layers` by one block whose parameters are [layers, ...], on the meta device."""
    block = model.model.layers[0].to("meta")
    for module in block.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(layers, *weight.shape, device="meta"), weight.requires_grad))
    model.model.layers = block  # type: ignore[assignment]
    return model


class ScannedBlocks:
    """Runs the stacked blocks of a model. See llama.RunBlocks."""

    leading: Spec = ()  # sharding of the dimensions of a layer's weight before those that the sharding table has

    def __init__(self, config: TrainConfig, model: Llama, mesh: xs.Mesh, layout: XlaLayout, kernel: Kernel) -> None:
        """`model` has been stacked; of a model in pieces, the scan is over the longest piece."""
        block, precision = model.model.layers, precision_of(config)
        self.groups = scan_plan(block_mask(config, config.division.longest), config.checkpoint_num_layers)
        self.mesh, self.layout, self.kernel = mesh, layout, kernel
        self.kv_heads, self.repeats = model.shape.num_kv_heads, kv_repeats(config, model.shape)
        # Of matrix products, and of gradients of matrices while they are summed over devices
        self.compute, self.reduction = precision.compute, precision.gradient_reduction
        self.gathers = layout.split.parameters and layout.mesh.shard * layout.mesh.context > 1
        for module in block.modules():
            if isinstance(module, Linear):
                module.multiply = multiply
        # A meta copy names the weights; the stacked ones are passed in at each call.
        self.names = [name for name, _ in block.named_parameters()]
        # scan caches its traced graphs by the identity of these functions: made once, not per step.
        self.bodies = {
            has_dropout: [self._body(block, len(group.mask), has_dropout) for group in self.groups]
            for has_dropout in (False, True)
        }
        table = ACTIVATIONS if kernel == "chunked" else KERNEL_ACTIVATIONS
        markers = 1 + place_activations(block, table, mesh, layout)
        markers += 2 * sum(self._is_repeated(name) for name in self.names)
        markers += 2 * sum(self._is_gathered(name) for name in self.names)
        modules = config.recomputed_modules(block)
        for path in modules:
            mark_boundaries(block.get_submodule(path))
        self.partitions = [
            _partition(group.mask, markers, is_selective=bool(modules), saves_attention=config.save_attention)
            for group in self.groups
        ]

    def __call__(self, block: Iterable[nn.Module], x: Tensor, inputs: BatchInputs) -> Tensor:
        weights = dict(block.named_parameters())  # type: ignore[attr-defined]
        for spec in self.lookup_to_stream():
            x = xs.mark_sharding_with_gradients(x, self.mesh, spec)
        carry: Carry = (x, *to_floats(inputs))
        bodies = self.bodies[inputs.noise is not None]
        for group, body, partition in zip(self.groups, bodies, self.partitions, strict=True):
            stacks = {name: layers_of(weights[name], group) for name in self.names}
            carry, _ = xla_scan.scan(body, carry, stacks, partition_fn=partition, is_fn_pure=True)
        return carry[0]

    def _body(self, block: nn.Module, count: int, has_dropout: bool) -> Body:
        def body(carry: Carry, weights: dict[str, Tensor]) -> tuple[Carry, None]:
            x, *rest = carry
            inputs = _from_floats([tensor.detach() for tensor in rest], has_dropout, self.kernel)
            for i in range(count):
                # The marker keeps the rows on their devices, and tells _partition where a block begins.
                x = xs.mark_sharding_with_gradients(x, self.mesh, self.layout.stream())
                layer = {name: self.grouped(self._weight(name, weights[name][i])) for name in self.names}
                x = functional_call(block, layer, (x, inputs), strict=True)
                inputs = inputs.next_block()
            if has_dropout:
                rest[-1] = rest[-1] + count  # the layer's index
            return (x, *rest), None

        return body

    def lookup_to_stream(self) -> list[Spec]:
        """Specs that move a looked-up activation, step by step, to the sharding of the residual stream.

        Where the embedding's columns are sharded, so is the result of a lookup; from there to rows is one all-to-all
        inside a shard group, and before it one to tokens inside a context group. Without these markers, or in one step,
        the compiler replicates the whole activation ("involuntary full rematerialization"); with the last step left to
        the first block, the loop carries columns, and every block moves them to rows and back.
        """
        if not self.layout.split.parameters:
            return []
        steps: list[Spec] = [(REPLICAS, None, ("shard", "context")), (REPLICAS, "context", "shard")]
        mesh = self.layout.mesh._asdict()
        specs = [on_mesh(spec, mesh) for spec in (steps if mesh["context"] > 1 else steps[1:])]
        return [*specs, self.layout.stream()]

    def grouped(self, weight: Tensor) -> Tensor:
        """Return `weight` as `multiply` reads it; see `grouped`."""
        return grouped(weight, self.layout)

    def _is_repeated(self, name: str) -> bool:
        return self.layout.repeated_heads and re.search(r"[kv]_proj\.(weight|bias|lora_B)", name) is not None

    def _is_gathered(self, name: str) -> bool:
        """Return whether the weight `name` is gathered before the products that read it."""
        return name.endswith("_proj.weight") and self.gathers and not self._is_repeated(name)

    def _weight(self, name: str, weight: Tensor) -> Tensor:
        """`weight` as the block uses it: see narrowed; KV heads repeated as often as tensor ranks need them."""
        if self._is_gathered(name):
            specs = ((*self.leading, *of(f"{STACK}{name}")) for of in (self.layout.gathered, self.layout.parameter))
            gathered: Tensor = _Gather.apply(weight, str(self.mesh), *map(str, specs), self.compute, self.reduction)
            return gathered
        weight = narrowed(weight, self.reduction)
        if not self._is_repeated(name):
            return weight
        dim, inputs = len(self.leading), (None,) * (weight.dim() - len(self.leading) - 1)
        # First replicated: in one step the compiler finds no way from columns to repeated heads.
        weight = xs.mark_sharding_with_gradients(weight, self.mesh, (*self.leading, None, *inputs))
        heads = weight.unflatten(dim, (self.kv_heads, -1)).repeat_interleave(self.repeats, dim).flatten(dim, dim + 1)
        spec = (*self.leading, None if self.layout.whole_heads else "tensor", *inputs)
        return xs.mark_sharding_with_gradients(heads, self.mesh, spec)


def grouped(weight: Tensor, layout: XlaLayout) -> Tensor:
    """Return a matrix [O, I] as a group of one, [1, O, I], where context ranks share out the tokens of a row.

    `multiply` then sums over rows and tokens apart. Merged into one dimension, no rank has a contiguous range of them,
    and the compiler gathers all tokens on every rank.
    """
    return weight.unsqueeze(0) if layout.mesh.context > 1 and weight.dim() == 2 else weight


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [B, T, I] by the transpose of weight [O, I]: [B, T, O] in x's dtype. See ops.linear.

    A weight [S, O, I] has a matrix for each of S equal groups of rows.
    """
    if weight.dim() == 2:
        return linear(x, weight)
    grouped: Tensor = _GroupedLinear.apply(x, weight)
    return grouped


class _GroupedLinear(torch.autograd.Function):
    """As the product in ops.linear. S groups, B rows of one, T tokens, I inputs, O outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        groups = x.unflatten(0, (len(weight), -1))
        return contract("sbti,soi->sbto", groups, weight.to(x.dtype)).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        groups = grad.unflatten(0, (len(weight), -1))
        grad_x = contract("sbto,soi->sbti", groups, weight.to(grad.dtype)).flatten(0, 1)
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        inputs = x.unflatten(0, (len(weight), -1))
        return grad_x, contract("sbto,sbti->soi", groups.to(weight.dtype), inputs.to(weight.dtype))


def narrowed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in `dtype` if that is bf16: then its gradient is, too, already when devices sum it."""
    return weight.to(dtype) if dtype == torch.bfloat16 and weight.dim() > 1 else weight


def to_floats(inputs: BatchInputs) -> Carry:
    """Per-batch tensors as floats: hashes as halves of 16 bits, which fp32 represents exactly."""
    assert inputs.rope is not None
    carry = [*inputs.rope]
    if isinstance(inputs.segments, Tensor):
        carry.append(inputs.segments.float())
    if inputs.noise is not None:
        hashes = inputs.noise.token_hashes
        carry += [upper_bits(hashes, 16).float(), (hashes & 0xFFFF).float(), inputs.noise.layer.float()]
    return tuple(carry)


def _from_floats(carry: Sequence[Tensor], has_dropout: bool, kernel: Kernel) -> BatchInputs:
    cos, sin, *rest = carry
    noise = None
    if has_dropout:
        *rest, upper, lower, layer = rest
        noise = DropoutNoise((upper.int() << 16) | lower.int(), layer.int())
    return BatchInputs(segments=rest[0] if rest else None, noise=noise, rope=Rope(cos, sin), kernel=kernel)


def place_activations(root: nn.Module, table: Activations, mesh: xs.Mesh, layout: XlaLayout) -> int:
    """Shard the inputs and outputs of the modules as `table` says; return the number of markers."""
    modules = dict(root.named_modules())
    rows = [row for row in layout.activations(table) if row[0] in modules]  # not every feed-forward has a gate
    for name, side, spec in rows:
        forward, backward = layout.of_module(spec), layout.of_gradient(spec)
        mark = partial(mark_both_ways, mesh=mesh, forward=forward, backward=backward)
        if side == "input":
            modules[name].register_forward_pre_hook(lambda _, args, mark=mark: (mark(args[0]), *args[1:]))
        else:
            modules[name].register_forward_hook(lambda _, __, output, mark=mark: mark(output))
    return len(rows)


def mark_both_ways(x: Tensor, mesh: xs.Mesh, forward: Spec, backward: Spec) -> Tensor:
    """Shard x as `forward` says, and its gradient as `backward` says."""
    marked: Tensor = _MarkBothWays.apply(x, str(mesh), str(forward), str(backward))
    return marked


class _MarkBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: str, forward: str, backward: str) -> Any:
        ctx.mesh, ctx.of_gradient = mesh, backward
        return torch.ops.xla.aot_mark_sharding(x, mesh, forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return torch.ops.xla.aot_mark_sharding(grad, ctx.mesh, ctx.of_gradient), None, None, None


class _Gather(torch.autograd.Function):
    """A sharded weight, gathered in the dtype of the products; its gradient is sharded as the weight is.

    Left to a TPU's compiler, products are loops over the shards of their weights, which read and write the whole sum of
    the products at every turn: 1.7 times the bytes of HBM (llama3_8b on 16 chips, benchmarks/RESULTS.md), and a
    recomputed block's backward pass gathers the weights of q, k and v twice.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, mesh: str, gathered: str, sharded: str, compute: torch.dtype, reduction: torch.dtype
    ) -> Tensor:
        ctx.mesh, ctx.sharded, ctx.dtype = mesh, sharded, weight.dtype
        if weight.dtype != compute:
            weight = opaque(weight).to(compute)
        shard = torch.ops.xla.aot_mark_sharding(weight, mesh, sharded)
        unsharded: Tensor = torch.ops.xla.aot_mark_sharding(shard, mesh, gathered)
        return unsharded.to(torch.bfloat16 if reduction == torch.bfloat16 else ctx.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sharded: Tensor = torch.ops.xla.aot_mark_sharding(grad, ctx.mesh, ctx.sharded)
        return sharded.to(ctx.dtype), None, None, None, None, None


@torch.library.custom_op("pretraining::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    """Return `x`, fp32, which the compiler rounds here or later, but not before.

    A TPU's compiler looks through slices and loops for what is only read in bf16, and rounds the shards of all layers
    before the loop over them: a copy of 2 bytes per parameter that lives as long as the step.
    """
    bits = torch_xla._XLAC._xla_user_computation("xla::bitcast", [x], _bitcast(x.shape, "F32", "S32"))
    torch_xla._XLAC._xla_optimization_barrier_(bits)
    (same,) = torch_xla._XLAC._xla_user_computation("xla::bitcast", bits, _bitcast(x.shape, "S32", "F32"))
    return same


opaque.register_fake(torch.empty_like)


@cache
def _bitcast(shape: torch.Size, source: str, target: str) -> Any:
    """Return the program that reads fp32 as integers, or back; a view does not within a scan."""
    types = vars(xb.Type)
    return xb.create_computation("bitcast", lambda x: x.bitcast(types[target]), [xb.mkshape(types[source], shape)])


@torch.library.custom_op("pretraining::boundary", mutates_args=())
def boundary(x: Tensor) -> Tensor:
    """Return `x`; in a traced graph, the beginning or end of a module that is recomputed."""
    return x.clone()


boundary.register_fake(torch.empty_like)
boundary.register_autograd(lambda _, grad: grad)


def mark_boundaries(module: nn.Module) -> None:
    """Mark the beginning and the end of `module` in a traced graph."""
    module.register_forward_pre_hook(lambda _, args: (boundary(args[0]), *args[1:]))
    module.register_forward_hook(lambda _, __, output: boundary(output))


def layers_of(stack: Tensor, group: ScanGroup) -> Tensor:
    """[layers, ...] -> [repeats, blocks per body, ...] of this group's layers."""
    size = len(group.mask)
    layers = stack[group.start : group.start + group.repeats * size]
    return layers.view(group.repeats, size, *stack.shape[1:])


# Operations that are recomputed in every block
MADE_AGAIN = ("mark_sharding", "boundary", "opaque")


def _partition(mask: tuple[bool, ...], markers: int, *, is_selective: bool, saves_attention: bool) -> Partition:
    """Return a partitioner that recomputes the blocks where `mask` is True.

    A block has `markers` sharding markers, the first at its beginning. is_selective: of a selected block only what lies
    between two boundaries is recomputed.

    Of everything else the min-cut decides: it recomputes what is cheap for its memory (casts, norms, masks) and never a
    matrix product, which is faster than keeping everything. That includes what the backward pass reads in products
    only: keeping it costs 118 MB for each block of llama3_8b, and more time (benchmarks/RESULTS.md).

    Attention scores are recomputed in every block: the backward pass computes them as the forward pass did, so the
    joint graph contains them once, and the partition would keep them, [queries, keys] for each head.
    saves_attention: the results of a fused kernel are kept in recomputed blocks, too, so that it does not run again.

    Sharding markers are recomputed in every block: they compute nothing, kept activations have their sharding in the
    backward pass again, where the compiler otherwise shards them like weights, and what a marker gathers, weights or
    the tokens of tensor ranks, is gathered again instead of being kept. So are opaque weights, and boundaries: a
    module's result is no more kept than what lies inside.
    """

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        for node, block, is_inside, is_score in _forward_nodes(joint, len(mask), markers):
            is_recomputed = mask[block] and (is_inside or not is_selective)
            is_free = getattr(node.target, "is_view", False) or node.target is torch.ops.aten.cat.default
            policy = None
            if saves_attention and _is_fused_attention(node):
                policy = CheckpointPolicy.MUST_SAVE
            elif is_recomputed or is_score or is_free or any(word in str(node.target) for word in MADE_AGAIN):
                policy = CheckpointPolicy.MUST_RECOMPUTE
            if policy:
                node.meta["recompute"] = policy
                node.meta["ac_graph_id"] = block
        with functorch_config.patch(ban_recompute_materialized_backward=False):
            return min_cut_rematerialization_partition(joint, inputs, **options)

    return partition


def _is_marker(node: fx.Node) -> bool:
    return "mark_sharding" in str(node.target)


def _is_fused_attention(node: fx.Node) -> bool:
    """Return whether `node` is a kernel, an operation of this name, or one of its results."""
    return "fused_attention" in str(node.target) or any(
        "fused_attention" in str(source.target) for source in node.all_input_nodes if node.target is operator.getitem
    )


def _forward_nodes(joint: fx.GraphModule, blocks: int, markers: int) -> Iterator[tuple[fx.Node, int, bool, bool]]:
    """Yield the operations of the blocks' forward pass, each with its block.

    Then whether it lies between two boundaries, and whether it computes a chunk's attention probabilities.
    """
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    backward: set[fx.Node] = set()  # what depends on the gradient of an output
    for node in joint.graph.nodes:
        if "tangents" in str(node.target) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    count = sum(_is_marker(node) and node not in backward for node in calls)
    assert count == blocks * markers, f"{count} sharding markers in {blocks} blocks with {markers} each"
    marker = boundaries = 0
    is_score = False
    for node in calls:
        marker += _is_marker(node)
        boundaries += "boundary" in str(node.target)
        if "contract" in str(node.target):
            is_score = node.args[0] == PRODUCTS
        block = (marker - 1) // markers
        if block == blocks:
            return
        if block >= 0:
            yield node, block, boundaries % 2 == 1, is_score and node.meta["val"].shape[-1] > 1
