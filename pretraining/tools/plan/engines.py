"""The engine and the layout that a planned configuration would have."""

from __future__ import annotations

from pretraining.config.devices import PLAN_KINDS
from pretraining.parallel.layout import Layout, TorchLayout, layout_of, torch_layout
from pretraining.parallel.mesh import Mesh
from pretraining.parallel.stages import block_runs, pieces, stage_of
from pretraining.tools.plan.settings import PlanConfig


def engine_of(config: PlanConfig) -> str:
    """Return the engine that would run: the one asked for, or what `auto` chooses on this kind of device."""
    return PLAN_KINDS[config.plan_device_kind].engine if config.engine == "auto" else config.engine


def piece_runs(config: PlanConfig) -> int:
    """Return how often a step runs a piece on a device: the torch engine runs none while a stage idles."""
    if engine_of(config) == "xla":
        return block_runs(config)
    return config.virtual_pipeline_size * (config.gradient_accumulation_steps or 1)


def outer_runs(config: PlanConfig) -> int:
    """Return the number of micro-batches of a step whose embedding, head and loss a device computes.

    The stages of the XLA engine share them out; on the torch engine the first or the last stage computes all.
    """
    micro_batches = config.gradient_accumulation_steps or 1
    return micro_batches // (config.pipeline_parallel_size if engine_of(config) == "xla" else 1)


def ends_of_stage(config: PlanConfig) -> int:
    """Return how many of the embedding and the head a stage computes."""
    first, last = stage_of(config, 0), stage_of(config, len(pieces(config)) - 1)
    return 2 if engine_of(config) == "xla" or first == last else 1


def layout_in(config: PlanConfig, mesh: Mesh) -> Layout | TorchLayout:
    """Return the layout of `config` in its engine."""
    if engine_of(config) == "xla":
        return layout_of(config, mesh)
    return torch_layout(config, mesh)
