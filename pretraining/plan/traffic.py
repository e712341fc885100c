"""The collectives of one optimizer step, as bytes that leave one device.

A ring of n devices moves (n - 1) / n of the whole tensor past each of them for an all-gather or a reduce-scatter, and
twice that for an all-reduce (Patarasuk and Yuan 2009); less is not possible for any algorithm.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.optim.precision import precision_of
from pretraining.parallel.layout import Layout, StateTensor, TorchLayout
from pretraining.parallel.mesh import Mesh
from pretraining.parallel.recompute import block_mask
from pretraining.plan.engines import engine_of, layout_in
from pretraining.plan.memory import stream_bytes
from pretraining.plan.stages import WHOLE, Stage


class Collective(NamedTuple):
    """One kind of communication of a step."""

    what: str
    operation: str  # "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or "send"
    axes: tuple[str, ...]  # of the mesh, or "stage"
    bytes: int  # that leave one device in a step
    least: int  # that any run of this strategy must send


def ring(whole: float, ranks: int, *, both: bool = False) -> int:
    """Bytes that leave a device for a collective on a tensor of so many bytes."""
    return int((2 if both else 1) * whole * (ranks - 1) / ranks)


def collectives(config: TrainConfig, mesh: Mesh, weights: list[StateTensor], stage: Stage = WHOLE) -> list[Collective]:
    """Return everything that a step of a stage with these parameters communicates, except scalars."""
    layout = layout_in(config, mesh)
    if isinstance(layout, TorchLayout):
        of_parameters = _of_shards(config, layout, weights)
    else:
        of_parameters = _of_parameters(config, layout, weights, stage)
    found = [*of_parameters, *_of_activations(config, mesh), *_between_stages(config, mesh, stage)]
    return [one for one in found if one.bytes]


def _bytes_along(weights: list[StateTensor], mesh: Mesh, width: int) -> int:
    """Of all matrices, as `shard` and `context` see them: a tensor rank's part, whole along both."""
    return sum(w.tensors * math.prod(w.shape) * width for w in weights if len(w.shape) > 1) // mesh.tensor


def _looked_up(config: TrainConfig, mesh: Mesh) -> Collective:
    """A lookup in an embedding whose columns are split gives columns of all tokens of the group: one all-to-all makes
    them all columns of a rank's own tokens, and one takes their gradients back. No row is ever gathered."""
    shape, passes = model_shape(config), config.gradient_accumulation_steps or 1
    tokens = config.batch_size * config.seq_length // mesh.context
    least = 2 * passes * ring(tokens * shape.hidden_size * precision_of(config).stream.itemsize, mesh.shard)
    return Collective("looked-up tokens", "all-to-all", ("shard",), least, least)


def _of_parameters(config: TrainConfig, layout: Layout, weights: list[StateTensor], stage: Stage) -> list[Collective]:
    mesh, split = layout.mesh, layout.split
    passes = config.gradient_accumulation_steps or 1
    precision, ranks = precision_of(config), mesh.shard * mesh.context
    if split.parameters:
        weights = [weight for weight in weights if "embed_" not in weight.name]
    wide = _bytes_along(weights, mesh, precision.stored.itemsize)
    narrow = _bytes_along(weights, mesh, precision.products.itemsize)
    along = ("shard", "context")
    if split.parameters:
        # Once for the forward and once for the backward pass of every micro-batch; a recomputed block's once more, for
        # its products by the weights and by their transposes gather apart.
        gathers = ring(narrow, ranks)
        blocks = [weight for weight in weights if ".layers." in weight.name]
        mask = block_mask(config, model_shape(config).num_layers)
        again = ring(_bytes_along(blocks, mesh, precision.products.itemsize), ranks) * sum(mask) // len(mask)
        return [
            *([_looked_up(config, mesh)] if stage.number == 0 else []),
            Collective("parameters, forward", "all-gather", along, passes * gathers, gathers),
            Collective("parameters, backward", "all-gather", along, passes * (gathers + again), gathers),
            Collective("gradients", "reduce-scatter", along, passes * ring(wide, ranks), ring(wide, ranks)),
            _over_replicas(wide // ranks, mesh, passes),
        ]
    if split.moments:
        reduced = passes if split.gradients else 1
        scatter = ring(wide, ranks)
        return [
            Collective("gradients", "reduce-scatter", along, reduced * scatter, scatter),
            Collective("updated parameters", "all-gather", along, ring(wide, ranks), ring(wide, ranks)),
            _over_replicas(wide // ranks, mesh, 1),
        ]
    everywhere = mesh.replica * ranks
    least = ring(wide, everywhere, both=True)
    return [Collective("gradients", "all-reduce", ("replica", *along), passes * least, least)]


def _of_shards(config: TrainConfig, layout: TorchLayout, weights: list[StateTensor]) -> list[Collective]:
    """FSDP2's: each block is gathered for its forward pass, and again for its backward pass where it was freed between;
    embedding and head once. Replicas add up after the last micro-batch. With zero1 all of it comes once a step."""
    mesh, precision = layout.mesh, precision_of(config)
    passes = 1 if layout.gathers_once else config.gradient_accumulation_steps or 1
    blocks = [weight for weight in weights if ".layers." in weight.name]
    forward = ring(_bytes_along(weights, mesh, precision.products.itemsize), mesh.shard)
    backward = (
        ring(_bytes_along(blocks, mesh, precision.products.itemsize), mesh.shard)
        if layout.reshards_after_forward
        else 0
    )
    wide = _bytes_along(weights, mesh, precision.reduced.itemsize)
    scatter = ring(wide, mesh.shard)
    return [
        Collective("parameters, forward", "all-gather", ("shard",), passes * forward, forward),
        Collective("parameters, backward", "all-gather", ("shard",), passes * backward, backward),
        Collective("gradients", "reduce-scatter", ("shard",), passes * scatter, scatter),
        _over_replicas(wide // mesh.shard, mesh, 1),
    ]


def _between_stages(config: TrainConfig, mesh: Mesh, stage: Stage) -> list[Collective]:
    """Every piece of layers gives its result on, and the gradient of what it took back: to and from both neighbours but
    at the two ends, where the first piece takes from nobody and the last gives to nobody."""
    if stage.of == 1:
        return []
    passes = config.gradient_accumulation_steps or 1
    sent = int(passes * (2 * stage.pieces - 1) * stream_bytes(config, mesh))
    return [Collective("between stages", "send", ("stage",), sent, int(passes * stream_bytes(config, mesh)))]


def _over_replicas(part: int, mesh: Mesh, passes: int) -> Collective:
    least = ring(part, mesh.replica, both=True)
    return Collective("gradients, over replicas", "all-reduce", ("replica",), passes * least, least)


def _of_activations(config: TrainConfig, mesh: Mesh) -> list[Collective]:
    shape, mask = model_shape(config), block_mask(config, model_shape(config).num_layers)
    passes, width = config.gradient_accumulation_steps or 1, precision_of(config).stream.itemsize
    tokens = config.batch_size * config.seq_length // mesh.context
    stream = tokens * shape.hidden_size * width
    if config.sequence_parallel and engine_of(config) == "torch":
        return _of_tokens(mask, ring(stream, mesh.tensor), passes)
    # Attention and feed-forward end in partial sums. So does the gradient by what a matrix takes: by that of queries,
    # keys and values, and by that of gate and up, each on its own, where one sum for each norm would do. A recomputed
    # block adds up again what its attention gave, for the feed-forward layer needs it. And the embedding and the head.
    # The torch engine adds up once where attention and feed-forward begin.
    backward = 2 if engine_of(config) == "torch" else 3 + (2 if shape.gated else 1)
    sums = sum(2 + backward + recomputed for recomputed in mask) + 2
    split = ring(stream, mesh.tensor, both=True)
    keys = 2 * tokens * mesh.context * shape.num_kv_heads * shape.head_dim // mesh.tensor * width
    gathers = sum(2 + recomputed for recomputed in mask)  # forward, again, and the sum of their gradients
    gathered = ring(keys, mesh.context)
    return [
        Collective("stream", "all-reduce", ("tensor",), passes * sums * split, passes * (4 * len(mask) + 2) * split),
        Collective(
            "keys and values", "all-gather", ("context",), passes * gathers * gathered, 2 * len(mask) * gathered
        ),
    ]


def _of_tokens(mask: tuple[bool, ...], moved: int, passes: int) -> list[Collective]:
    """The torch engine's with sequence_parallel: tokens are gathered where attention and feed-forward begin, added up
    and scattered where they end, and the other way round backward. A recomputed block does all of it again but the last
    scatter. Embedding and head add up whole; the stream is cut after the one and joined before the other."""
    gathers = sum(4 + 2 * recomputed for recomputed in mask) + 2
    scatters = sum(4 + recomputed for recomputed in mask)
    along, blocks = ("tensor",), 4 * len(mask)
    return [
        Collective("stream, outside", "all-reduce", along, passes * 4 * moved, passes * 4 * moved),
        Collective("tokens", "all-gather", along, passes * gathers * moved, passes * blocks * moved),
        Collective("partial sums", "reduce-scatter", along, passes * scatters * moved, passes * blocks * moved),
    ]
