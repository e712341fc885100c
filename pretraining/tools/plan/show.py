"""What --plan=True prints and writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from pretraining.checkpoint.files import writing_to
from pretraining.monitor.progress import heartbeat
from pretraining.tools.plan.checks import topology_devices
from pretraining.tools.plan.compiled import compile_step
from pretraining.tools.plan.page import as_json, compiled_json, compiled_page, page, ranking
from pretraining.tools.plan.plan import plan_of, search
from pretraining.tools.plan.settings import PlanConfig


def show(config: PlanConfig) -> int:
    """Print the plan or the ranking of plan_search, and the comparison of plan_compile. Return the exit code, 0."""
    config = replace(config, plan_devices=config.plan_devices or topology_devices(config))
    if config.plan_search:
        with heartbeat("searching meshes"):
            plans = search(config)
        print(ranking(plans, config), flush=True)
    else:
        plans = [plan_of(config)]
        print(page(plans[0]), flush=True)
    listed = [as_json(plan) for plan in plans]
    if config.plan_compile:
        compiled = compile_step(plans[0].config, plans[0].mesh.shard)
        print("\n" + compiled_page(plans[0], compiled))
        listed[0] |= {"compiled": compiled_json(compiled)}
    if config.plan_json:
        text = json.dumps(listed if config.plan_search else listed[0], indent=1) + "\n"
        with writing_to("plan_json", file := Path(config.plan_json), "give another file"):
            file.write_text(text)
    return 0
