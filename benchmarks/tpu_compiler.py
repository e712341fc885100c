"""Measure the step of the xla engine by the TPU's own compiler, next to MaxText's step.

    python -m benchmarks.tpu_compiler [--length=4096] [--attention_impl=chunked] [--save_attention=True]

Nothing runs: the compiler (requirements-tpu-aot.txt) compiles the step of llama3_8b with fsdp for a v6e:4x4, one
sequence per chip, every block recomputed. Any other flag is a setting. Prints a row of a table, and MaxText's rows as
benchmarks/maxtext.json has them, with their source. Figures are those of one chip and step.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretraining.configure import configure
from pretraining.plan.checks import topology_devices
from pretraining.plan.compiled import CompiledStep, compile_step
from pretraining.plan.plan import plan_of

CASE: dict[str, Any] = {
    "model_variant": "llama3_8b",
    "sharding_strategy": "fsdp",
    "fsdp_activation_checkpointing": True,
    "batch_size": 1,
    "plan": True,
    "plan_compile": True,
    "plan_device_kind": "tpu-v6e",
    "plan_topology": "4x4",
}
COLUMNS = ("step", "tokens", "temporaries, GB", "peak, GB", "TFLOP", "of them in kernels", "sent, GB", "million cycles")
MAXTEXT = Path(__file__).with_name("maxtext.json")


def row(name: str, length: int, step: CompiledStep) -> str:
    """Return a row of the table."""
    temporaries, peak = (max(getattr(program, key) for program in step.programs) for key in ("temporaries", "peak"))
    sizes = f"{temporaries / 1e9:.2f} | {peak / 1e9:.2f} | {step.flops / 1e12:.1f} | {step.kernel_flops / 1e12:.1f}"
    return f"| {name} | {length} | {sizes} | {sum(step.sent.values()) / 1e9:.1f} | {step.cycles / 1e6:,.0f} |"


def maxtext_rows(length: int) -> list[str]:
    """Return MaxText's rows; what its source does not have is n/a."""
    recorded = json.loads(MAXTEXT.read_text())
    rows = []
    for figures in recorded["steps"]:
        if figures["tokens"] == length:
            memory, flop = f"{figures['temporaries_gb']} | {figures['peak_gb']:.2f}", figures["tflop_without_kernels"]
            rest = f"{flop} and kernels | n/a | {figures['sent_gb']} | {figures['million_cycles']:,}"
            rows.append(f"| MaxText | {length} | {memory} | {rest} |")
    return [*rows, f"MaxText: {recorded['source']}"]


def main() -> None:
    """Compile and print; see the module's docstring."""
    options = dict(argument.removeprefix("--").split("=") for argument in sys.argv[1:])
    length = int(options.pop("length", "4096"))
    config = configure({**CASE, "seq_length": length, **options})
    plan = plan_of(replace(config, plan_devices=topology_devices(config)))
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    name = ", ".join(f"{key}={value}" for key, value in options.items()) or "ours"
    print(row(name, length, compile_step(plan.config, plan.mesh.shard)), flush=True)
    print("\n".join(maxtext_rows(length)))


if __name__ == "__main__":
    main()
