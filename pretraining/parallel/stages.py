"""The stages of a pipeline: which layers each of them has, and how long a step takes. Touches no device.

The layers are divided into pieces of consecutive ones; stage s of S has the pieces s, s + S, .. of
virtual_pipeline_size. All stages run the same program at once, so that a tick takes as long as the longest piece, and
shorter pieces are padded with identities.
"""

from __future__ import annotations

from itertools import pairwise

from pretraining.config.grammar import parse_cuts
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape


def pieces(config: TrainConfig) -> list[range]:
    """Return the layers of each piece: those between pipeline_cuts, or as equal as possible."""
    layers, count = model_shape(config).num_layers, config.pipeline_parallel_size * config.virtual_pipeline_size
    cuts = parse_cuts(config.pipeline_cuts) or even_cuts(layers, count)
    bounds = [0, *(layer + 1 for layer in cuts), layers]
    return [range(first, last) for first, last in pairwise(bounds)]


def even_cuts(layers: int, count: int) -> list[int]:
    """Return the last layer of each of `count` pieces but the last, as equal as possible."""
    return [-(-piece * layers // count) - 1 for piece in range(1, count)]


def piece_length(config: TrainConfig) -> int:
    """Return the layers of a piece, with its padding."""
    return max(map(len, pieces(config)))


def stacked_layers(config: TrainConfig) -> list[int | None]:
    """Return the layer at each position of the XLA engine's stack, in the order stage, piece, layer; None: padding."""
    length, stages, divided = piece_length(config), config.pipeline_parallel_size, pieces(config)
    in_order = [piece for stage in range(stages) for piece in divided[stage::stages]]
    return [layer for piece in in_order for layer in (*piece, *[None] * (length - len(piece)))]


def micro_batches_per_graph(config: TrainConfig) -> int:
    """Return the micro-batches that the XLA engine runs at a time: one, or with stages all of a step."""
    return (config.gradient_accumulation_steps or 1) if config.pipeline_parallel_size > 1 else 1


def ticks(config: TrainConfig) -> int:
    """Return the ticks of a pass over all micro-batches of a step: each runs one piece on every stage."""
    micro_batches = config.gradient_accumulation_steps or 1
    return config.virtual_pipeline_size * micro_batches + config.pipeline_parallel_size - 1


def block_runs(config: TrainConfig) -> int:
    """Return how often a step runs a piece on a device: for every micro-batch, or with stages in every tick."""
    return ticks(config) if config.pipeline_parallel_size > 1 else config.gradient_accumulation_steps or 1


def idle_share(config: TrainConfig) -> float:
    """Return a stage's idle time as a share of the time it works: (S - 1) / (pieces x micro-batches)."""
    micro_batches = config.gradient_accumulation_steps or 1
    return (config.pipeline_parallel_size - 1) / (config.virtual_pipeline_size * micro_batches)


def describe_pipeline(config: TrainConfig) -> str:
    """Return stages, pieces and padding, and how long a stage idles, in one line."""
    stages, virtual, length = config.pipeline_parallel_size, config.virtual_pipeline_size, piece_length(config)
    padding = stages * virtual * length - model_shape(config).num_layers
    of = f"{virtual} pieces of {length} layers" if virtual > 1 else f"{length} layers"
    padded = f", {padding} of which in all are padding," if padding else ""
    return f"{stages} stages of {of}{padded} in {ticks(config)} ticks; idle for {idle_share(config):.1%} of their work"
