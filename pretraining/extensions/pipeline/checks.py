"""Rules across the settings of pipelines."""

from __future__ import annotations

from collections.abc import Iterator

from pretraining.config.errors import Problem
from pretraining.config.validate import multiples_around, problem
from pretraining.config.variants import model_shape
from pretraining.extensions.pipeline.settings import PipelineConfig, parse_cuts
from pretraining.extensions.pipeline.stages import even_cuts


def check_pipeline(config: PipelineConfig) -> Iterator[Problem]:
    """Every piece of a pipeline has a layer, and micro-batches come in groups of as many as there are stages."""
    stages, layers, cuts = config.pipeline_parallel_size, model_shape(config).num_layers, config.pipeline_cuts
    count = stages * config.virtual_pipeline_size
    if stages == 1:
        return
    factors = f"x virtual_pipeline_size={config.virtual_pipeline_size} = {count} "
    if count > layers:
        remedy = f"{factors * (count > stages)}is more than num_layers={layers}; use fewer"
        yield problem(config, "pipeline_parallel_size", remedy)
    elif cuts and (len(parse_cuts(cuts)) != count - 1 or parse_cuts(cuts)[-1] >= layers - 1):
        even = ",".join(map(str, even_cuts(layers, count)))
        remedy = f"does not cut {layers} layers into {count} pieces; use {count - 1} numbers below {layers - 1}"
        yield problem(config, "pipeline_cuts", f"{remedy}, such as {even}")
    elif config.pipeline_balance and cuts:
        yield problem(config, "pipeline_balance", "has no effect, because pipeline_cuts is set; remove one of them")
    elif config.pipeline_balance and layers < 2 * count - 2:
        remedy = f"leaves the first or the last of {count} pieces without a layer; use num_layers of at least"
        yield problem(config, "pipeline_balance", f"{remedy} {2 * count - 2}, or remove it")
    micro_batches = config.gradient_accumulation_steps
    if micro_batches is None and config.global_batch_size is None:
        remedy = f"needs --gradient_accumulation_steps: a multiple of {stages}, such as {4 * stages}"
        yield problem(config, "pipeline_parallel_size", remedy)
    elif micro_batches and micro_batches % stages:
        remedy = f"is not a multiple of pipeline_parallel_size={stages}; use {multiples_around(micro_batches, stages)}"
        yield problem(config, "gradient_accumulation_steps", remedy)


def check_schedule(config: PipelineConfig) -> Iterator[Problem]:
    """The torch engine's schedule runs as many pieces as a stage has."""
    schedule, virtual = config.pipeline_schedule, config.virtual_pipeline_size
    if schedule in ("GPipe", "1F1B") and virtual > 1:
        remedy = f"runs one piece of a stage, and virtual_pipeline_size={virtual}; use Interleaved1F1B"
        yield problem(config, "pipeline_schedule", remedy)
    if schedule == "Interleaved1F1B" and virtual == 1:
        yield problem(config, "pipeline_schedule", "needs --virtual_pipeline_size of at least 2; or use 1F1B")


CHECKS = (check_pipeline, check_schedule)
