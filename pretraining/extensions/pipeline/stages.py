"""The stages of a pipeline: which layers each of them has, and how long a step takes. Touches no device.

The layers are divided into pieces of consecutive ones; stage s of S has the pieces s, s + S, .. of
virtual_pipeline_size. On the XLA engine all stages run the same program at once, so that a tick takes as long as the
longest piece, and shorter pieces are padded with identities; the torch engine runs each piece as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from pretraining.config.division import Division
from pretraining.config.variants import model_shape
from pretraining.extensions.pipeline.settings import PipelineConfig, parse_cuts


def pieces(config: PipelineConfig) -> list[range]:
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


def cuts_by_last_piece(config: PipelineConfig) -> list[str]:
    """Return pipeline_cuts for each size of the last piece up to an equal share, the others as equal as possible."""
    layers, count = model_shape(config).num_layers, config.pipeline_parallel_size * config.virtual_pipeline_size
    divided = ([*even_cuts(layers - last, count - 1), layers - last - 1] for last in range(1, layers // count + 1))
    return [",".join(map(str, cuts)) for cuts in divided]


def schedule_of(config: PipelineConfig) -> str:
    """Return the torch engine's schedule, by torch's name."""
    if config.pipeline_schedule != "auto":
        return config.pipeline_schedule
    return "Interleaved1F1B" if config.virtual_pipeline_size > 1 else "1F1B"


def pieces_of(config: PipelineConfig, stage: int) -> range:
    """Return the numbers of the pieces that a stage has."""
    return range(stage, len(pieces(config)), config.pipeline_parallel_size)


def layers_of_stage(config: PipelineConfig, stage: int) -> list[int]:
    """Return the layers of a stage's pieces."""
    divided = pieces(config)
    return [layer for piece in pieces_of(config, stage) for layer in divided[piece]]


def outer_modules(config: PipelineConfig, numbers: Collection[int]) -> list[str]:
    """Return the modules outside the blocks, by name, that the first and the last piece run, if `numbers` has them."""
    is_first, is_last = 0 in numbers, len(pieces(config)) - 1 in numbers
    is_used = {
        "model.embed_tokens": is_first or (is_last and config.tie_word_embeddings),
        "model.embed_positions": is_first and config.position_embedding_type == "learned_absolute",
        "model.norm": is_last,
        "lm_head": is_last,
    }
    return [path for path, used in is_used.items() if used]


def piece_length(config: PipelineConfig) -> int:
    """Return the layers of a piece, with its padding."""
    return max(map(len, pieces(config)))


def stacked_layers(config: PipelineConfig) -> list[int | None]:
    """Return the layer at each position of the XLA engine's stack, in the order stage, piece, layer; None: padding."""
    length, stages, divided = piece_length(config), config.pipeline_parallel_size, pieces(config)
    in_order = [piece for stage in range(stages) for piece in divided[stage::stages]]
    return [layer for piece in in_order for layer in (*piece, *[None] * (length - len(piece)))]


def ticks(config: PipelineConfig) -> int:
    """Return the ticks of a pass over all micro-batches of a step: each runs one piece on every stage."""
    micro_batches = config.gradient_accumulation_steps or 1
    return config.virtual_pipeline_size * micro_batches + config.pipeline_parallel_size - 1


def idle_share(config: PipelineConfig) -> float:
    """Return a stage's idle time as a share of the time it works: (S - 1) / (pieces x micro-batches)."""
    micro_batches = config.gradient_accumulation_steps or 1
    return (config.pipeline_parallel_size - 1) / (config.virtual_pipeline_size * micro_batches)


def pieces_in_flight(config: PipelineConfig, stage: int) -> int:
    """Return the largest number of micro-batches, counted once for each piece, whose activations a stage of the torch
    engine keeps at a time."""
    stages, virtual = config.pipeline_parallel_size, config.virtual_pipeline_size
    rounds = {
        "GPipe": virtual * (config.gradient_accumulation_steps or 1),
        "1F1B": stages - stage,
        "Interleaved1F1B": (virtual - 1) * stages + 2 * (stages - 1 - stage) + 1,
    }
    return min(rounds[schedule_of(config)], virtual * (config.gradient_accumulation_steps or 1))


def describe_pipeline(config: PipelineConfig, engine: str) -> str:
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


class Stages(Division):
    """The layers of each stage. See Division."""

    setting = "pipeline_parallel_size"

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self.stages = config.pipeline_parallel_size
        self._config = config

    def pieces(self) -> list[range]:
        """See Division."""
        return pieces(self._config)

    @property
    def longest(self) -> int:
        """See Division."""
        count = self.stages * self._config.virtual_pipeline_size
        return super().longest if count <= model_shape(self._config).num_layers else 0

    @property
    def longest_text(self) -> str:
        """See Division."""
        return f"the {self.longest} layers of a piece"

    def stack(self) -> list[int | None]:
        """See Division."""
        return stacked_layers(self._config)

    def shares(self, stages: int, *, is_stacked: bool) -> list[tuple[int, Collection[str] | None]]:
        """See Division."""
        config = self._config
        if stages == 1:
            return super().shares(stages, is_stacked=is_stacked)
        if is_stacked:
            return [(len(stacked_layers(config)) // stages, None)]
        return [
            (len(layers_of_stage(config, stage)), outer_modules(config, pieces_of(config, stage)))
            for stage in range(stages)
        ]

    def notes(self, engine: str) -> list[str]:
        """See Division."""
        lines = [f"pipeline: {describe_pipeline(self._config, engine)}"]
        if getattr(self._config, "rampup_batch_size", "") and engine == "xla":  # of an extension
            lines.append("rampup_batch_size: with stages every size of the global batch is compiled at its first step")
        return lines
