"""Measure how communication grows: bytes that a device sends in a step, by strategy and number of devices.

    python -m benchmarks.scaling [--plot=FILE.html]

Nothing runs: the TPU compiler (requirements/tpu-aot.txt) compiles the step for slices of TPU v5e, and the script counts
the bytes that its collectives send, in loops once per iteration. It prints them with the prediction of the plan and the
minimum that the strategy needs (a ring's share of everything that must be gathered, scattered or reduced, once).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from plotly.graph_objects import Figure, Scatter

from pretraining.extensions.units import size
from pretraining.tools.plan.checks import topology_devices
from pretraining.tools.plan.compiled import compile_step
from pretraining.tools.plan.plan import plan_of
from pretraining.tools.plan.settings import PlanConfig

TOPOLOGIES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8")
# Wide enough that on 64 devices no shard is smaller than a tile of the device (8 x 128).
MODEL: dict[str, Any] = {
    "model_variant": "custom",
    "num_layers": 4,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_kv_heads": 8,
    "vocab_size": 8192,
    "seq_length": 1024,
    "batch_size": 1,
    "plan": True,
    "plan_compile": True,
    "plan_device_kind": "tpu-v5e",
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"sharding_strategy": "ddp"},
    "zero1": {"sharding_strategy": "zero1"},
    "fsdp": {"sharding_strategy": "fsdp"},
    "hsdp, groups of 4": {"sharding_strategy": "hsdp", "sharding_group_size": 4},
    "fsdp x tensor 4": {"sharding_strategy": "fsdp", "tensor_parallel_size": 4},
    "fsdp x context 4": {"sharding_strategy": "fsdp", "context_parallel_size": 4},
}


def measured(strategy: str, topology: str) -> tuple[int, int, int]:
    """Return the bytes that a device sends in a step: compiled, planned, and the minimum."""
    config = PlanConfig(**MODEL, **STRATEGIES[strategy], plan_topology=topology)
    plan = plan_of(replace(config, plan_devices=topology_devices(config)))
    sent = sum(compile_step(plan.config, plan.mesh.shard).sent.values())
    return sent, sum(one.bytes for one in plan.collectives), sum(one.least for one in plan.collectives)


def main() -> None:
    """Measure and print; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE.html")
    options = parser.parse_args()
    figure = Figure()
    print("| strategy | devices | compiled | plan | minimum | compiled / minimum | compiled / plan |")
    print("|" + "---|" * 7)
    for strategy in STRATEGIES:
        inner = 4 if "4" in strategy else 1
        sent_bytes = {
            devices: measured(strategy, topology)
            for topology in TOPOLOGIES
            if (devices := topology_devices(PlanConfig(plan_topology=topology))) >= inner
        }
        for devices, (sent, planned, least) in sent_bytes.items():
            ratios = f"{sent / least:.2f} | {sent / planned:.2f}" if least else "- | -"
            row = f"| {strategy} | {devices} | {size(sent)} | {size(planned)} | {size(least)} | {ratios} |"
            print(row, flush=True)
        for label, column, dash in ((strategy, 0, "solid"), (f"{strategy}, minimum", 2, "dash")):
            values = [row[column] for row in sent_bytes.values()]
            figure.add_trace(Scatter(x=list(sent_bytes), y=values, name=label, line={"dash": dash}))
    if options.plot:
        figure.update_layout(xaxis_title="devices", yaxis_title="bytes that a device sends in a step")
        figure.write_html(options.plot)


if __name__ == "__main__":
    main()
