"""What --plan=True prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

from pretraining.config.training import TrainConfig
from pretraining.plan.page import as_json, page, ranking
from pretraining.plan.plan import plan_of, search


def show(config: TrainConfig) -> int:
    """Print the plan, or the ranking of plan_search. The exit code: 0."""
    plans = search(config) if config.plan_search else [plan_of(config)]
    print(ranking(plans) if config.plan_search else page(plans[0]))
    if config.plan_json:
        written = [as_json(plan) for plan in plans]
        Path(config.plan_json).write_text(json.dumps(written if config.plan_search else written[0], indent=1) + "\n")
    return 0
