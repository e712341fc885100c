"""Rules across the settings of the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pretraining.config.errors import Problem
from pretraining.config.validate import problem
from pretraining.models.checks import check_dimensions_are_set
from pretraining.tools.plan.devices import PLAN_KINDS
from pretraining.tools.plan.settings import PlanConfig, parse_topology


def check_plan(config: PlanConfig) -> Iterator[Problem]:
    """A plan needs devices, their kind, and the dimensions of the model."""
    if config.plan:
        yield from (found._replace(is_missing=False) for found in check_dimensions_are_set(config))
    if config.plan and not config.plan_devices and not config.plan_topology:
        yield Problem("--plan=True", "needs --plan_devices=N")
    if config.plan and not config.plan_device_kind:
        yield Problem("--plan=True", f"needs --plan_device_kind: one of {', '.join(PLAN_KINDS)}")


def check_topology(config: PlanConfig) -> Iterator[Problem]:
    """The topology is one of its device kind's, and plan_devices are one or several slices of it."""
    if not (config.plan_topology and config.plan_device_kind):
        return
    axes = PLAN_KINDS[config.plan_device_kind].topology_axes
    if not axes:
        tpus = ", ".join(name for name, kind in PLAN_KINDS.items() if kind.topology_axes)
        remedy = f"is a slice of TPUs, and plan_device_kind={config.plan_device_kind}; use {tpus}"
        yield problem(config, "plan_topology", remedy)
    elif len(parse_topology(config.plan_topology)) != axes:
        example = "x".join(["4"] * axes)
        yield problem(config, "plan_topology", f"of {config.plan_device_kind} needs {axes} axes, such as {example}")
    elif config.plan_devices % topology_devices(config):
        chips = topology_devices(config)
        remedy = f"has {chips} chips, and plan_devices={config.plan_devices}; give a multiple, for several slices"
        yield problem(config, "plan_topology", remedy)


def check_compilation(config: PlanConfig) -> Iterator[Problem]:
    """The TPU compiler compiles one configuration of the xla engine for one topology."""
    if not config.plan_compile:
        return
    if not config.plan_topology:
        yield Problem("--plan_compile=True", "needs --plan_topology, such as 4x4 of tpu-v6e")
    elif config.plan_devices not in (0, topology_devices(config)):
        yield Problem("--plan_compile=True", "compiles for one slice; remove plan_devices")
    if config.plan_search:
        yield Problem("--plan_compile=True", "compiles one configuration; remove plan_search")
    if config.engine == "torch":
        yield Problem("--plan_compile=True", "compiles the step of the xla engine; remove --engine=torch")


def topology_devices(config: PlanConfig) -> int:
    """Return the chips of plan_topology: on every generation since v4, a chip is one device."""
    return math.prod(parse_topology(config.plan_topology))


CHECKS = (check_plan, check_topology, check_compilation)
