"""The stages of a pipeline: which layers each of them has, and how long a step takes. Touches no device.

The layers are divided into pieces of consecutive ones; stage s of S has the pieces s, s + S, .. of
virtual_pipeline_size. On the XLA engine all stages run the same program at once, so that a tick takes as long as the
longest piece, and shorter pieces are padded with identities; the torch engine runs each piece as it is.
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
    if config.pipeline_balance:  # layer 0 is the embedding, and the last one the head
        cuts = [layer - 1 for layer in even_cuts(layers + 2, count)]
    bounds = [0, *(layer + 1 for layer in cuts), layers]
    return [range(first, last) for first, last in pairwise(bounds)]


def even_cuts(layers: int, count: int) -> list[int]:
    """Return the last layer of each of `count` pieces but the last, as equal as possible."""
    return [-(-piece * layers // count) - 1 for piece in range(1, count)]


def cuts_by_last_piece(config: TrainConfig) -> list[str]:
    """Return pipeline_cuts for each size of the last piece up to an equal share, the others as equal as possible."""
    layers, count = model_shape(config).num_layers, config.pipeline_parallel_size * config.virtual_pipeline_size
    divided = ([*even_cuts(layers - last, count - 1), layers - last - 1] for last in range(1, layers // count + 1))
    return [",".join(map(str, cuts)) for cuts in divided]


SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")  # schedules that compute the gradients of weights apart


def schedule_of(config: TrainConfig) -> str:
    """Return the torch engine's schedule, by torch's name."""
    if config.pipeline_schedule != "auto":
        return config.pipeline_schedule
    return "Interleaved1F1B" if config.virtual_pipeline_size > 1 else "1F1B"


def splits_backward(config: TrainConfig) -> bool:
    """Return whether the torch engine computes the gradients of weights after those of activations."""
    return config.pipeline_parallel_size > 1 and schedule_of(config) in SPLIT_BACKWARD


def stage_of(config: TrainConfig, piece: int) -> int:
    """Return the stage that has this piece; with ZBVZeroBubble, pieces go to the last stage and back."""
    stages = config.pipeline_parallel_size
    if config.pipeline_schedule == "ZBVZeroBubble" and piece >= stages:
        return 2 * stages - 1 - piece
    return piece % stages


def pieces_of(config: TrainConfig, stage: int) -> list[int]:
    """Return the numbers of the pieces that a stage has."""
    return [piece for piece in range(len(pieces(config))) if stage_of(config, piece) == stage]


def layers_of_stage(config: TrainConfig, stage: int) -> list[int]:
    """Return the layers of a stage's pieces."""
    divided = pieces(config)
    return [layer for piece in pieces_of(config, stage) for layer in divided[piece]]


def outer_modules(config: TrainConfig, numbers: list[int]) -> list[str]:
    """Return the modules outside the blocks, by name, that the first and the last piece run, if `numbers` has them."""
    is_first, is_last = 0 in numbers, len(pieces(config)) - 1 in numbers
    is_used = {
        "model.embed_tokens": is_first or (is_last and config.tie_word_embeddings),
        "model.embed_positions": is_first and config.position_embedding_type == "learned_absolute",
        "model.norm": is_last,
        "lm_head": is_last,
    }
    return [path for path, used in is_used.items() if used]


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
    """Return a stage's idle time as a share of the time it works: (S - 1) / (pieces x micro-batches).

    The gradients of weights, a third of the work, fill two thirds of it or all (Qi et al. 2023, ZB-H1 and ZB-V).
    """
    micro_batches = config.gradient_accumulation_steps or 1
    idle = (config.pipeline_parallel_size - 1) / (config.virtual_pipeline_size * micro_batches)
    return idle * {"InterleavedZeroBubble": 1 / 3, "ZBVZeroBubble": 0.0}.get(config.pipeline_schedule, 1.0)


def pieces_in_flight(config: TrainConfig, stage: int) -> int:
    """Return the largest number of micro-batches, counted once for each piece, whose activations a stage of the torch
    engine keeps at a time."""
    stages, virtual = config.pipeline_parallel_size, config.virtual_pipeline_size
    rounds = {
        "GPipe": virtual * (config.gradient_accumulation_steps or 1),
        "1F1B": stages - stage,
        "Interleaved1F1B": (virtual - 1) * stages + 2 * (stages - 1 - stage) + 1,
    }
    kept = rounds.get(schedule_of(config), virtual * stages)
    return min(kept, virtual * (config.gradient_accumulation_steps or 1))


def describe_pipeline(config: TrainConfig, engine: str) -> str:
    """Return stages, pieces and padding, and how long a stage idles, in one line."""
    stages, virtual, length = config.pipeline_parallel_size, config.virtual_pipeline_size, piece_length(config)
    if engine == "torch":
        sizes = sorted({len(layers_of_stage(config, stage)) for stage in range(stages)})
        layers = f"{' to '.join(map(str, {sizes[0]: 0, sizes[-1]: 0}))} layers{f' in {virtual} pieces' * (virtual > 1)}"
        return f"{stages} stages of {layers}, {schedule_of(config)}; idle for {idle_share(config):.1%} of their work"
    padding = stages * virtual * length - model_shape(config).num_layers
    of = f"{virtual} pieces of {length} layers" if virtual > 1 else f"{length} layers"
    padded = f", {padding} of which in all are padding," if padding else ""
    return f"{stages} stages of {of}{padded} in {ticks(config)} ticks; idle for {idle_share(config):.1%} of their work"
