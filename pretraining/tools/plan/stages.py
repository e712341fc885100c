"""What a planned pipeline computes, keeps and sends. Without stages nothing of the pipeline's extension is imported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pretraining.config.declaration import settings_of
from pretraining.config.variants import model_shape
from pretraining.tools.plan.engines import engine_of
from pretraining.tools.plan.settings import PlanConfig


def has_stages(config: PlanConfig) -> bool:
    """Return whether the layers are divided into stages."""
    return config.division.stages > 1


def micro_batches(config: PlanConfig) -> int:
    """Return the micro-batches of a step."""
    return config.gradient_accumulation_steps or 1


def pieces_of_stage(config: PlanConfig) -> int:
    """Return the pieces that each stage has."""
    return len(config.division.pieces()) // config.division.stages


def micro_batches_per_graph(config: PlanConfig) -> int:
    """Return the micro-batches that the XLA engine runs at a time: one, or with stages all of a step."""
    return micro_batches(config) if has_stages(config) else 1


def planned_idle_share(config: Any) -> float:
    """Return a stage's idle time as a share of the time it works."""
    if not has_stages(config):
        return 0.0
    from pretraining.extensions.pipeline.stages import idle_share as of_pipeline

    return of_pipeline(config)


def planned_ticks(config: Any) -> int:
    """Return how often the XLA engine runs a piece on a device in a step."""
    if not has_stages(config):
        return micro_batches(config)
    from pretraining.extensions.pipeline.stages import ticks as of_pipeline

    return of_pipeline(config)


def piece_runs(config: PlanConfig) -> int:
    """Return how often a step runs a piece on a device: the torch engine runs none while a stage idles."""
    return planned_ticks(config) if engine_of(config) == "xla" else pieces_of_stage(config) * micro_batches(config)


def outer_runs(config: PlanConfig) -> int:
    """Return the number of micro-batches of a step whose embedding, head and loss a device computes.

    The stages of the XLA engine share them out; on the torch engine the first or the last stage computes all.
    """
    return micro_batches(config) // (config.division.stages if engine_of(config) == "xla" else 1)


def ends_of_stage(config: PlanConfig) -> int:
    """Return how many of the embedding and the head a stage computes."""
    return 1 if engine_of(config) == "torch" and has_stages(config) else 2


def kept_micro_batches(config: Any, stage: int) -> int:
    """Return how many micro-batches' activations a stage keeps, counted once for each of its pieces."""
    if not has_stages(config):
        return 1
    from pretraining.extensions.pipeline.stages import pieces_in_flight

    return planned_ticks(config) if engine_of(config) == "xla" else pieces_in_flight(config, stage)


def waiting_micro_batches(config: PlanConfig, stage: int) -> int:
    """Return the micro-batches' residual streams for which a stage has buffers.

    On the XLA engine its share of the queue; on the torch engine all that arrive, and their gradients.
    """
    if not has_stages(config):
        return 0
    if engine_of(config) == "xla":
        return micro_batches(config) // config.division.stages
    numbers, count = _numbers(config, stage)
    return (2 * len(numbers) - (0 in numbers) - (count - 1 in numbers)) * micro_batches(config)


def sent_by(config: PlanConfig, stage: int) -> int:
    """Return the tensors that a stage of the torch engine sends for every micro-batch."""
    numbers, count = _numbers(config, stage)
    neighbours = [other for number in numbers for other in (number - 1, number + 1) if 0 <= other < count]
    return sum(other not in numbers for other in neighbours)


def _numbers(config: Any, stage: int) -> tuple[range, int]:
    """Return the numbers of a stage's pieces, and the number of all pieces."""
    from pretraining.extensions.pipeline.stages import pieces_of

    return pieces_of(config, stage), len(config.division.pieces())


def largest_share(config: PlanConfig, of_blocks: float, of_others: float) -> float:
    """Return the work of the torch engine's stage with most of it, as if all stages had as much.

    of_blocks: of all blocks. of_others: of the head, which the last stage has.
    """
    shape, stages = model_shape(config), config.division.stages
    shares = config.division.shares(stages, is_stacked=False)
    work = [layers / shape.num_layers * of_blocks for layers, _ in shares]
    work[-1] += of_others
    return stages * max(work)


def other_cuts(config: Any) -> Iterator[Any]:
    """Yield the configuration with other cuts of its pipeline; nothing without stages."""
    if has_stages(config):
        from pretraining.extensions.pipeline.stages import cuts_by_last_piece

        for cuts in ("", *cuts_by_last_piece(config)):
            yield replace(config, pipeline_balance=False, pipeline_cuts=cuts)


def pipelines(config: PlanConfig) -> list[tuple[int, dict[str, Any]]]:
    """Return the stages that a search tries, each with its settings."""
    if "pipeline_parallel_size" not in settings_of(type(config)):
        return [(1, {})]
    layers, plain = model_shape(config).num_layers, {"pipeline_cuts": "", "pipeline_balance": False}
    plain |= {"pipeline_schedule": "auto"}
    counts = [(1, 1), *((stages, count) for stages in (2, 4, 8, 16) for count in (1, 2) if stages * count <= layers)]
    return [
        (stages, {**plain, "pipeline_parallel_size": stages, "virtual_pipeline_size": count})
        for stages, count in counts
    ]
