"""The engine and the layout that a planned configuration would have."""

from __future__ import annotations

from pretraining.parallel.layout import TorchLayout, XlaLayout, torch_layout, xla_layout
from pretraining.parallel.mesh import Mesh
from pretraining.tools.plan.devices import PLAN_KINDS
from pretraining.tools.plan.settings import PlanConfig


def engine_of(config: PlanConfig) -> str:
    """Return the engine that would run: the one asked for, or what `auto` chooses on this kind of device."""
    return PLAN_KINDS[config.plan_device_kind].engine if config.engine == "auto" else config.engine


def layout_in(config: PlanConfig, mesh: Mesh) -> XlaLayout | TorchLayout:
    """Return the layout of `config` in its engine."""
    if engine_of(config) == "xla":
        return xla_layout(config, mesh)
    return torch_layout(config, mesh)
