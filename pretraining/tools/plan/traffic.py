"""The collectives of one optimizer step, as bytes that leave one device.

On a ring of n devices an all-gather or a reduce-scatter sends (n - 1) / n of the unsharded tensor from each of them, an
all-reduce twice that (Patarasuk and Yuan 2009); no algorithm sends less.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import NamedTuple

from pretraining.config.variants import model_shape
from pretraining.extensions.state_bytes import StateTensor
from pretraining.optim.precision import precision_of
from pretraining.parallel.layout import KEYS_AND_VALUES, TorchLayout, XlaLayout
from pretraining.parallel.mesh import Mesh
from pretraining.parallel.recompute import block_mask
from pretraining.tools.plan.engines import engine_of, layout_in
from pretraining.tools.plan.memory import stream_bytes
from pretraining.tools.plan.settings import PlanConfig
from pretraining.tools.plan.stages import ends_of_stage, outer_runs, piece_runs, pieces_of_stage, planned_ticks, sent_by

SHARDS = ("shard", "context")


class Collective(NamedTuple):
    """All collectives of one purpose in a step."""

    purpose: str
    operation: str  # "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute" or "send"
    axes: tuple[str, ...]  # of the mesh
    bytes: int  # that leave one device in a step
    least: int  # that every implementation of this strategy must send


def ring(unsharded: float, ranks: int, *, both: bool = False) -> int:
    """Return the bytes that a collective on a tensor of so many bytes sends from one device; `both`: all-reduce."""
    return int((2 if both else 1) * unsharded * (ranks - 1) / ranks)


def collectives(config: PlanConfig, mesh: Mesh, weights: list[StateTensor]) -> list[Collective]:
    """Return everything that a step on devices with these parameters communicates, except scalars."""
    layout = layout_in(config, mesh)
    if isinstance(layout, TorchLayout):
        of_parameters = _of_fsdp2(config, layout, weights)
    else:
        of_parameters = _of_table(config, layout, weights)
    listed = [*of_parameters, *_of_activations(config, mesh), *_between_stages(config, mesh)]
    if isinstance(layout, TorchLayout) and layout.repeated_heads:
        listed.append(_of_repeated_heads(config, mesh, weights))
    if isinstance(layout, TorchLayout) and mesh.stage > 1 and config.tie_word_embeddings:
        listed.append(_of_tied_embedding(config, mesh, weights))
    return [collective for collective in listed if collective.bytes]


# ---- Parameters and gradients


def _matrix_bytes(weights: list[StateTensor], mesh: Mesh, width: int) -> int:
    """Return the bytes of a tensor rank's part of all matrices, unsharded along `shard` and `context`."""
    return sum(w.tensors * math.prod(w.shape) * width for w in weights if len(w.shape) > 1) // mesh.tensor


def _run_bytes(config: PlanConfig, weights: list[StateTensor], mesh: Mesh, width: int) -> int:
    """Return `_matrix_bytes` times the runs of each matrix in a step."""
    blocks, outer = _divided(weights)
    of_blocks = piece_runs(config) * _matrix_bytes(blocks, mesh, width) // pieces_of_stage(config)
    return of_blocks + outer_runs(config) * _matrix_bytes(outer, mesh, width)


def _divided(weights: list[StateTensor]) -> tuple[list[StateTensor], list[StateTensor]]:
    """Return the parameters of the blocks, and the others."""
    blocks = [weight for weight in weights if ".layers." in weight.name]
    return blocks, [weight for weight in weights if weight not in blocks]


def _of_table(config: PlanConfig, layout: XlaLayout, weights: list[StateTensor]) -> list[Collective]:
    """Return the XLA engine's collectives of parameters and gradients."""
    mesh, split, precision = layout.mesh, layout.split, precision_of(config)
    ranks = mesh.shard * mesh.context
    if split.parameters:
        weights = [weight for weight in weights if "embed_" not in weight.name]
    stored = _matrix_bytes(weights, mesh, precision.parameters.itemsize)
    summed = _run_bytes(config, weights, mesh, _gradient_width(config))
    scatter = ring(_matrix_bytes(weights, mesh, _gradient_width(config)), ranks)
    if split.parameters:
        # Gathered once for the forward and once for the backward pass of every micro-batch.
        width = precision.compute.itemsize
        gathers = ring(_run_bytes(config, weights, mesh, width), ranks)
        least = ring(_matrix_bytes(weights, mesh, width), ranks)
        return [
            _embedding_lookup(config, mesh),
            Collective("parameters, forward", "all-gather", SHARDS, gathers, least),
            Collective("parameters, backward", "all-gather", SHARDS, gathers, least),
            Collective("gradients", "reduce-scatter", SHARDS, ring(summed, ranks), scatter),
            _all_reduce(config, weights, mesh, ("replica",), ranks),
        ]
    gathered = ring(stored, ranks)
    updated = Collective("updated parameters", "all-gather", SHARDS, gathered, gathered)
    if split.moments and (split.gradients or mesh.stage == 1):
        over_replicas = _all_reduce(config, weights, mesh, ("replica",), ranks)
        scatters = ring(summed, ranks) if split.gradients else scatter
        return [
            Collective("gradients", "reduce-scatter", SHARDS, scatters, scatter),
            updated,
            over_replicas._replace(bytes=over_replicas.least),
        ]
    reduced = _all_reduce(config, weights, mesh, ("replica", *SHARDS), 1)
    return [reduced, updated] if split.moments else [reduced]


def _gradient_width(config: PlanConfig) -> int:
    """Return the bytes of a value of a matrix's gradient while it is summed over devices.

    That of an embedding which is not sharded is summed as it is stored, which is not counted apart.
    """
    precision = precision_of(config)
    return min(precision.parameters.itemsize, precision.gradient_reduction.itemsize)


def _all_reduce(
    config: PlanConfig, weights: list[StateTensor], mesh: Mesh, axes: tuple[str, ...], shards: int
) -> Collective:
    """Return the all-reduces of gradients, each of one of so many shards; outside the blocks over stages, too."""
    ranks, width = math.prod(getattr(mesh, axis) for axis in axes), _gradient_width(config)
    sent = least = 0
    for group, copies in zip(_divided(weights), (ranks, mesh.stage * ranks), strict=True):
        sent += ring(_run_bytes(config, group, mesh, width) // shards, copies, both=True)
        least += ring(_matrix_bytes(group, mesh, width) // shards, copies, both=True)
    purpose = "gradients, over replicas" if axes == ("replica",) else "gradients"
    return Collective(purpose, "all-reduce", axes, sent, least)


def _embedding_lookup(config: PlanConfig, mesh: Mesh) -> Collective:
    """Return the all-to-alls of an embedding whose columns are sharded, forward and backward; no row is gathered.

    A lookup gives some columns of all tokens of the group; the all-to-all makes them all columns of a rank's tokens.
    """
    tokens = config.batch_size * config.seq_length // mesh.context
    looked_up = tokens * model_shape(config).hidden_size * precision_of(config).activations.itemsize
    least = 2 * outer_runs(config) * ring(looked_up, mesh.shard)
    return Collective("embedded tokens", "all-to-all", ("shard",), least, least)


def _of_fsdp2(config: PlanConfig, layout: TorchLayout, weights: list[StateTensor]) -> list[Collective]:
    """Return the torch engine's collectives of parameters and gradients.

    A block is gathered for its forward pass, and again for its backward pass where it was freed in between; embedding
    and head are gathered once. Replicas are reduced after the last micro-batch. With zero1 all of it is once a step.
    """
    mesh, precision = layout.grid, precision_of(config)
    shards, replicas = (("shard",), ("replica", "context")) if layout.strategy == "ddp" else (SHARDS, ("replica",))
    count = 1 if layout.gathers_once else outer_runs(config)
    blocks = [weight for weight in weights if ".layers." in weight.name] if layout.reshards_after_forward else []
    forward = ring(_matrix_bytes(weights, mesh, precision.compute.itemsize), mesh.shard)
    backward = ring(_matrix_bytes(blocks, mesh, precision.compute.itemsize), mesh.shard)
    reduced = _matrix_bytes(weights, mesh, precision.gradient_reduction.itemsize)
    scatter = ring(reduced, mesh.shard)
    over_replicas = ring(reduced // mesh.shard, mesh.replica, both=True)
    return [
        Collective("parameters, forward", "all-gather", shards, count * forward, forward),
        Collective("parameters, backward", "all-gather", shards, count * backward, backward),
        Collective("gradients", "reduce-scatter", shards, count * scatter, scatter),
        Collective("gradients, over replicas", "all-reduce", replicas, over_replicas, over_replicas),
    ]


# ---- Activations


def _between_stages(config: PlanConfig, mesh: Mesh) -> list[Collective]:
    """Return the activations that a device sends to the next stage and the gradients that it sends back.

    On the XLA engine, as much is sent in every tick as the queue of waiting micro-batches moves on. At least, the last
    stage sends what its pieces but the last made, and all gradients.
    """
    if mesh.stage == 1:
        return []
    stream, count = stream_bytes(config, mesh), config.gradient_accumulation_steps or 1
    least = int(count * (2 * pieces_of_stage(config) - 1) * stream)
    if engine_of(config) == "torch":
        sent = int(count * max(sent_by(config, stage) for stage in range(mesh.stage)) * stream)
        return [Collective("between stages", "send", ("stage",), sent, min(least, sent))]
    sent = int(4 * (planned_ticks(config) + 1) * stream)
    return [Collective("between stages", "collective-permute", ("stage",), sent, least)]


def _of_repeated_heads(config: PlanConfig, mesh: Mesh, weights: list[StateTensor]) -> Collective:
    """Return the all-reduce of the gradients of keys' and values' projections, of which each tensor rank has a part."""
    shards = [w.tensors * math.prod(w.local_shape(mesh)) for w in weights if fnmatchcase(w.name, KEYS_AND_VALUES)]
    sent = ring(sum(shards) * precision_of(config).gradients.itemsize, mesh.tensor, both=True)
    return Collective("key/value projections", "all-reduce", ("tensor",), sent, sent)


def _of_tied_embedding(config: PlanConfig, mesh: Mesh, weights: list[StateTensor]) -> Collective:
    """Return the all-reduce of the gradient of an embedding that is the head, too: in the first and the last stage."""
    shards = [math.prod(weight.local_shape(mesh)) for weight in weights if "embed_tokens" in weight.name]
    sent = ring(sum(shards) * precision_of(config).gradients.itemsize, 2, both=True)
    return Collective("tied embedding", "all-reduce", ("stage",), sent, sent)


def _of_activations(config: PlanConfig, mesh: Mesh) -> list[Collective]:
    shape, mask = model_shape(config), block_mask(config, config.division.longest)
    count, width = outer_runs(config), precision_of(config).activations.itemsize
    tokens = config.batch_size * config.seq_length // mesh.context
    stream = tokens * shape.hidden_size * width
    keys = 2 * tokens * mesh.context * shape.num_kv_heads * shape.head_dim // mesh.tensor * width
    # What the XLA engine gathers for a block is gathered again for its backward pass if nothing is recomputed, too.
    again = [recomputed or engine_of(config) == "xla" for recomputed in mask]
    runs, of_keys = piece_runs(config), _of_keys(config, again, ring(keys, mesh.context))
    if config.sequence_parallel:
        ends = ends_of_stage(config) * count
        return [*_of_sequence_parallel(mask, again, ring(stream, mesh.tensor), runs, ends), *of_keys]
    # All-reduced: the outputs of attention and feed-forward, and of a recomputed block attention's once more, because
    # the feed-forward layer needs it; the embedding and the head; the gradients of what matrices read, which the XLA
    # engine reduces apart for queries, keys, values, gate and up, and the torch engine once for each norm.
    backward = 2 if engine_of(config) == "torch" else 3 + (2 if shape.gated else 1)
    sums = runs * sum(2 + backward + recomputed for recomputed in mask) + ends_of_stage(config) * count
    reduced = ring(stream, mesh.tensor, both=True)
    least = (4 * len(mask) + 2) * reduced
    return [Collective("stream", "all-reduce", ("tensor",), sums * reduced, count * least), *of_keys]


def _of_keys(config: PlanConfig, again: list[bool], gathered: int) -> list[Collective]:
    """Return the all-gathers of keys and values over context ranks, `again` backward, and their gradients' sums."""
    runs, least = piece_runs(config), len(again) * gathered
    gathers = runs * sum(1 + repeated for repeated in again) * gathered
    return [
        Collective("keys and values", "all-gather", ("context",), gathers, least),
        Collective("key/value gradients", "reduce-scatter", ("context",), runs * least, least),
    ]


def _of_sequence_parallel(
    mask: tuple[bool, ...], again: list[bool], sent: int, runs: int, ends: int
) -> list[Collective]:
    """Return the collectives of tensor ranks that shard the tokens of the residual stream.

    Tokens are gathered before attention and feed-forward, and reduce-scattered after them; the other way round
    backward. A recomputed block repeats all of it but the last reduce-scatter; `again`: whether a block gathers again.
    Embedding and head are all-reduced.
    """
    gathers = runs * sum(4 + 2 * repeated for repeated in again) + ends
    scatters = runs * sum(4 + recomputed for recomputed in mask)
    along, least = ("tensor",), runs * 4 * len(mask) * sent
    return [
        Collective("stream outside blocks", "all-reduce", along, 2 * ends * sent, 2 * ends * sent),
        Collective("tokens", "all-gather", along, gathers * sent, least),
        Collective("partial sums", "reduce-scatter", along, scatters * sent, least),
    ]
