"""What one device holds: parameters, gradients, optimizer state, activations, logits and gathered parameters.

Follows from the layout and the rules of the optimizers alone; no device, and no tensor with values.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from pretraining.config.grammar import parse_modules
from pretraining.config.variants import model_shape, padded_vocabulary
from pretraining.extensions.state_bytes import StateTensor
from pretraining.models.ops import LOSS_ROWS
from pretraining.optim.precision import precision_of
from pretraining.parallel.layout import TorchLayout
from pretraining.parallel.mesh import Mesh, kv_repeats
from pretraining.parallel.recompute import block_mask
from pretraining.tools.plan.devices import PLAN_KINDS
from pretraining.tools.plan.engines import engine_of, layout_in
from pretraining.tools.plan.settings import PlanConfig
from pretraining.tools.plan.stages import kept_micro_batches, waiting_micro_batches
from pretraining.tools.plan.tiles import bytes_in_memory


class DeviceMemory(NamedTuple):
    """Bytes of one device at the end of a forward pass, when it holds most."""

    parameters: int
    gradients: int
    moments: int
    activations: int
    logits: int
    gathered: int  # parameters of a block while it runs, where they are sharded otherwise

    @property
    def total(self) -> int:
        return sum(self)


def weights_of(tensors: list[StateTensor]) -> list[StateTensor]:
    """Return the parameters among `tensors`."""
    return [tensor for tensor in tensors if tensor.kind == "parameters"]


def tensor_bytes(config: PlanConfig, mesh: Mesh, tensor: StateTensor) -> int:
    """Return the bytes of `tensor` in the memory of one device: the blocks' tensors are stacked."""
    local = tensor.local_shape(mesh)
    stacked = (tensor.tensors, *local) if tensor.tensors > 1 else local
    return bytes_in_memory(PLAN_KINDS[config.plan_device_kind], stacked, tensor.width)


def device_memory(config: PlanConfig, mesh: Mesh, tensors: list[StateTensor], stage: int = 0) -> DeviceMemory:
    """Return what one device of this stage holds, given the tensors of its state."""
    sums = dict.fromkeys(("parameters", "copies", "gradients", "moments"), 0)
    for tensor in tensors:
        sums[tensor.kind] += tensor_bytes(config, mesh, tensor)
    return DeviceMemory(
        sums["parameters"] + sums["copies"],
        sums["gradients"],
        sums["moments"],
        activations(config, mesh, stage),
        logits(config, mesh) if any(tensor.name == "model.norm.weight" for tensor in tensors) else 0,
        _gathered(config, mesh, weights_of(tensors)),
    )


def activations(config: PlanConfig, mesh: Mesh, stage: int = 0) -> int:
    """Return the bytes of activations when the backward pass begins.

    They are those that one micro-batch keeps, and those of the blocks that are being recomputed. A pipeline of the XLA
    engine keeps them for each of its ticks, and the micro-batches that wait; one of the torch engine as its schedule
    says, and buffers for all micro-batches that arrive, and for their gradients.
    """
    together = min(config.checkpoint_num_layers, sum(block_mask(config, config.division.longest)))
    kept, recomputed = kept_activations(config, mesh), int(together * _block_bytes(config, mesh, ()))
    waiting = int(waiting_micro_batches(config, stage) * stream_bytes(config, mesh))
    return kept_micro_batches(config, stage) * kept + recomputed + waiting


def kept_activations(config: PlanConfig, mesh: Mesh) -> int:
    """Return the bytes that a device's blocks keep for the backward pass of one micro-batch, or in one tick.

    Of a recomputed block, or of several that are recomputed together, that is the input; with save_attention, and where
    a fused kernel runs, also attention's result. Of a block whose modules are recomputed, it is what they leave.
    """
    mask = block_mask(config, config.division.longest)
    others = (len(mask) - sum(mask)) * _block_bytes(config, mesh, ())
    if config.checkpoint_granularity == "selective":
        return int(others + sum(mask) * _block_bytes(config, mesh, parse_modules(config.checkpoint_modules)))
    inputs = sum(mask) / config.checkpoint_num_layers * stream_bytes(config, mesh)
    results = sum(mask) * _attention_bytes(config, mesh) if config.save_attention and _has_kernel(config) else 0
    return int(others + inputs + results)


def _has_kernel(config: PlanConfig) -> bool:
    if engine_of(config) == "torch":
        return config.attention_impl == "auto" and not config.attention_dropout
    return config.plan_device_kind.startswith("tpu-") and config.attention_on("TPU").kernel is not None


def _attention_bytes(config: PlanConfig, mesh: Mesh) -> float:
    """Return the bytes of the result of a block's attention, as wide as its queries."""
    shape, tokens = model_shape(config), config.batch_size * config.seq_length / mesh.context
    queries = shape.num_attention_heads * shape.head_dim / mesh.tensor
    return tokens * queries * precision_of(config).activations.itemsize


def stream_bytes(config: PlanConfig, mesh: Mesh) -> float:
    """Return the bytes of the residual stream of one micro-batch."""
    tokens = config.batch_size * config.seq_length / mesh.context
    width = model_shape(config).hidden_size / (mesh.tensor if config.sequence_parallel else 1)
    return tokens * width * precision_of(config).activations.itemsize


def _block_bytes(config: PlanConfig, mesh: Mesh, modules: Collection[str]) -> float:
    """Return the bytes that a block keeps of which only `modules` are recomputed. See Settings.checkpoint_modules.

    For each token both engines keep the input, queries, keys, values, attention's result, gate and up. The xla engine
    also keeps the projection of attention's result and, with sharding markers, a normed vector (counted from what the
    compiled step stacks, tests/tools/plan/test_against_the_compiler.py), and recomputes the rest. The torch engine
    keeps two normed vectors, the input of the feed-forward layer, keys and values before the rotation, and the product
    of gate and up; with context ranks, also the keys and values of all of them.
    """
    shape, is_torch = model_shape(config), engine_of(config) == "torch"
    tokens, width = config.batch_size * config.seq_length / mesh.context, precision_of(config).activations.itemsize
    kv_heads = shape.num_kv_heads * kv_repeats(config, shape)
    keys = shape.head_dim * (kv_heads / mesh.tensor if kv_heads % mesh.tensor == 0 else shape.num_kv_heads)
    products = is_torch and "mlp_activation" not in modules
    wide = 0 if "mlp" in modules else (1 + shape.gated + products) * shape.intermediate_size / mesh.tensor
    is_marked = mesh.shard * mesh.context * mesh.tensor > 1
    streams = 4 if is_torch else 2 + is_marked
    vectors = streams * stream_bytes(config, mesh)
    if "attention" in modules:
        return vectors + tokens * width * wide
    vectors += 2 * _attention_bytes(config, mesh)
    gathered = 2 * keys * mesh.context if mesh.context > 1 and is_torch else 0
    return vectors + tokens * width * ((2 + 2 * is_torch) * keys + gathered + wide)


def logits(config: PlanConfig, mesh: Mesh) -> int:
    """Return the bytes of the logits of one micro-batch, their fp32 copy and their gradient.

    The torch engine holds them for LOSS_ROWS tokens at a time, and the fp32 sum of the head's gradient over those.
    """
    tokens, width = config.batch_size * config.seq_length // mesh.context, precision_of(config).activations.itemsize
    columns = padded_vocabulary(config) // mesh.tensor
    if engine_of(config) == "torch":
        return columns * (min(tokens, LOSS_ROWS) * (2 * width + 4) + 4 * model_shape(config).hidden_size)
    return tokens * columns * (width + 8)


def _gathered(config: PlanConfig, mesh: Mesh, weights: list[StateTensor]) -> int:
    """Return the bytes of gathered parameters: two blocks, the running and the prefetched, and embedding or head.

    The torch engine keeps the head, and where it does not reshard after a forward pass, the embeddings and all blocks.
    """
    layout, precision = layout_in(config, mesh), precision_of(config)
    block = sum(math.prod(weight.shape) for weight in weights if ".layers." in weight.name)
    outer = {weight.name: math.prod(weight.shape) for weight in weights if ".layers." not in weight.name}
    if isinstance(layout, TorchLayout):
        if layout.grid.shard == 1 and precision.compute == precision.parameters:
            return 0
        blocks = 2 if layout.reshards_after_forward else max(weight.tensors for weight in weights)
        frees_embeddings = layout.reshards_after_forward and not config.tie_word_embeddings
        ends = sum(size for name, size in outer.items() if not ("embed_" in name and frees_embeddings))
        return precision.compute.itemsize * (blocks * block + ends) // mesh.tensor
    ranks = mesh.shard * mesh.context
    if not layout.split.parameters or ranks == 1:
        return 0
    # Over 64 chips of v5p libtpu gathers by a sum of shards padded with zeros, which needs the same memory once more;
    # not over 32, and not over 64 of a v4, v5e or v6e (benchmarks/RESULTS.md).
    times = 2 if config.plan_device_kind == "tpu-v5p" and ranks >= 64 else 1
    return times * precision.compute.itemsize * (2 * block + max(outer.values(), default=0)) // mesh.tensor
