"""What one device holds: every parameter with its share, gradients, optimizer state, activations and logits.

From the sharding table and the rules of the optimizers alone; no device, and no tensor with values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from torch import nn

from pretraining.config.devices import PLAN_KINDS, DeviceKind
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape, padded_vocabulary
from pretraining.models.init import on_meta
from pretraining.models.ops import LOSS_ROWS
from pretraining.optim.optimizer import build_optimizer, reduced
from pretraining.optim.precision import precision_of
from pretraining.parallel.engine import Mesh
from pretraining.parallel.mesh import kv_repeats
from pretraining.parallel.recompute import block_mask
from pretraining.parallel.sharding import Layout, Spec, parts
from pretraining.plan.engines import TorchLayout, engine_of, layout_in
from pretraining.plan.stages import WHOLE, Stage
from pretraining.plan.tiles import bytes_in_memory

T = TypeVar("T")


class Weight(NamedTuple):
    """One parameter, or those of the same name in all blocks."""

    name: str  # with * for the block's number
    shape: tuple[int, ...]
    tensors: int  # such ones
    spec: Spec
    bytes: int  # of one device, all of them together, as its memory lays them out


class State(NamedTuple):
    """Bytes of one device."""

    parameters: int
    gradients: int
    moments: int
    activations: int
    logits: int
    gathered: int  # parameters of a block while it runs, where they are split otherwise

    @property
    def total(self) -> int:
        """All of it at the time of the peak."""
        return sum(self)


class Device(NamedTuple):
    """One of the mesh."""

    kind: DeviceKind
    mesh: Mesh

    def holds(self, shape: Iterable[int], spec: Spec, tensors: int, width: int) -> int:
        """Bytes of `tensors` tensors of a shape, stacked where there are several; an uneven split is padded."""
        sizes = self.mesh._asdict()
        part = [-(-extent // parts(axis, sizes)) for extent, axis in zip(shape, spec, strict=True)]
        return bytes_in_memory(self.kind, [tensors, *part] if tensors > 1 else part, width)


def weights_of(config: TrainConfig, mesh: Mesh, stage: Stage = WHOLE) -> list[Weight]:
    """Every parameter and its sharding, those of all blocks as one."""
    layout, stored = layout_in(config, mesh), precision_of(config).stored.itemsize
    device = Device(PLAN_KINDS[config.plan_device_kind], mesh)
    return [
        Weight(name, tuple(found[0].shape), len(found), spec, device.holds(found[0].shape, spec, len(found), stored))
        for name, found in _by_name(_held(config, stage)).items()
        for spec in [layout.parameter(name)]
    ]


def _by_name(named: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Those of all blocks under one name, with * for the number."""
    found: dict[str, list[T]] = {}
    for name, one in named:
        found.setdefault(re.sub(r"\.layers\.\d+\.", ".layers.*.", name), []).append(one)
    return found


def _held(config: TrainConfig, stage: Stage) -> Iterator[tuple[str, nn.Parameter]]:
    tied = model_shape(config).tie_word_embeddings
    yield from (pair for pair in on_meta(config).named_parameters() if stage.holds(pair[0], tied))


def state_of(config: TrainConfig, mesh: Mesh, stage: Stage = WHOLE) -> State:
    """Everything that one device holds at the end of a forward pass, its largest moment."""
    layout, precision = layout_in(config, mesh), precision_of(config)
    slots = build_optimizer(config, _held(config, stage)).slots
    weights, device = weights_of(config, mesh, stage), Device(PLAN_KINDS[config.plan_device_kind], mesh)
    gradients = moments = 0
    for name, found in _by_name((slot.name, slot) for slot in slots).items():
        slot, tensors = found[0], len(found)
        gradients += device.holds(slot.weight.shape, layout.gradient(name), tensors, precision.stored.itemsize)
        for moment in slot.rule.moments(slot.ndim).values():
            shape = reduced(slot.weight.shape, moment)
            spec = tuple(a if extent > 1 else None for a, extent in zip(layout.moment(name), shape, strict=True))
            moments += device.holds(shape, spec, tensors, precision.state.itemsize)
    copies = 2 if precision.copies else 1
    return State(
        copies * sum(weight.bytes for weight in weights),
        gradients,
        moments,
        activations(config, mesh, stage),
        logits(config, mesh) if stage.last else 0,
        _gathered(config, layout, mesh, weights),
    )


def activations(config: TrainConfig, mesh: Mesh, stage: Stage = WHOLE) -> int:
    """Bytes of activations at the backward pass's beginning: what is kept of one micro-batch, or of those that a
    pipeline has under way, and of recomputed blocks those that are whole again while their gradient is taken."""
    mask = block_mask(config, model_shape(config).num_layers)
    together = min(config.checkpoint_num_layers, sum(mask))
    waiting = stage.waiting(config.gradient_accumulation_steps or 1)
    return int(waiting * kept_activations(config, mesh)) + int(together * _block_bytes(config, mesh))


def kept_activations(config: TrainConfig, mesh: Mesh) -> int:
    """Bytes that the blocks keep for the backward pass, of one micro-batch; of a recomputed block, or several that are
    recomputed together, the input."""
    mask = block_mask(config, model_shape(config).num_layers)
    inputs = sum(mask) / config.checkpoint_num_layers * stream_bytes(config, mesh)
    return int((len(mask) - sum(mask)) * _block_bytes(config, mesh) + inputs)


def stream_bytes(config: TrainConfig, mesh: Mesh) -> float:
    """Bytes of what passes between two blocks, of one micro-batch."""
    tokens = config.batch_size * config.seq_length / mesh.context
    width = model_shape(config).hidden_size / (mesh.tensor if config.sequence_parallel else 1)
    return tokens * width * precision_of(config).stream.itemsize


def _block_bytes(config: TrainConfig, mesh: Mesh) -> float:
    """Of a block that is not recomputed: for each token six vectors as wide as the stream (input, two normed ones, what
    enters the feed-forward layer, queries, attention's result), keys and values before and after their rotation, and
    gate, up and their product. Scores are never kept. Counted from what the compiled step stacks
    (tests/plan/test_against_the_compiler.py)."""
    shape = model_shape(config)
    tokens, width = config.batch_size * config.seq_length / mesh.context, precision_of(config).stream.itemsize
    queries = shape.num_attention_heads * shape.head_dim / mesh.tensor
    used = shape.num_kv_heads * kv_repeats(config, shape)  # heads, those that are copied for use among them
    keys = shape.head_dim * (used / mesh.tensor if used % mesh.tensor == 0 else shape.num_kv_heads)
    wide = (3 if shape.gated else 2) * shape.intermediate_size / mesh.tensor
    return 4 * stream_bytes(config, mesh) + tokens * width * (2 * queries + 4 * keys + wide)


def logits(config: TrainConfig, mesh: Mesh) -> int:
    """Bytes of the output head's result, its fp32 copy and its gradient, of one micro-batch; in the torch engine of a
    piece of it, with the fp32 sum of the head's gradient over the pieces."""
    tokens, width = config.batch_size * config.seq_length // mesh.context, precision_of(config).stream.itemsize
    rows = padded_vocabulary(config) // mesh.tensor
    if engine_of(config) == "torch":
        return rows * (min(tokens, LOSS_ROWS) * (2 * width + 4) + 4 * model_shape(config).hidden_size)
    return tokens * rows * (width + 8)


def _gathered(config: TrainConfig, layout: Layout | TorchLayout, mesh: Mesh, weights: list[Weight]) -> int:
    """Parameters as the products read them, of two blocks, the one that runs and the one fetched ahead, and the larger
    of embedding and head. The torch engine keeps both of these, and where it frees nothing all blocks."""
    precision = precision_of(config)
    blocks = [math.prod(weight.shape) for weight in weights if ".layers." in weight.name]
    outer = [math.prod(weight.shape) for weight in weights if ".layers." not in weight.name]
    if isinstance(layout, TorchLayout):
        if mesh.shard == 1 and precision.products == precision.stored:
            return 0
        held = 2 if layout.frees else model_shape(config).num_layers
        return precision.products.itemsize * (held * sum(blocks) + sum(outer)) // mesh.tensor
    ranks = mesh.shard * mesh.context
    if not layout.split.parameters or ranks == 1:
        return 0
    # Over 64 chips of v5p libtpu gathers by a sum of parts laid out among zeros, which takes that room once more; over
    # 32 it does not, nor over 64 of a v4, v5e or v6e (benchmarks/RESULTS.md).
    times = 2 if config.plan_device_kind == "tpu-v5p" and ranks >= 64 else 1
    return times * precision.products.itemsize * (2 * sum(blocks) + max(outer, default=0)) // mesh.tensor
