"""Measure the step of the xla engine by the TPU's own compiler, next to MaxText's step.

    python -m benchmarks.tpu_compiler [--seq_length=8192] [--attention_impl=chunked] [--reduce_dtype=bf16]

Nothing runs: the compiler (requirements/tpu-aot.txt) compiles the step of llama3_8b with fsdp for a v6e:4x4, one
sequence of 4096 tokens per chip, every block recomputed. Flags are settings. Prints a row of a table and, where
benchmarks/maxtext.json has that case, MaxText's row and its source. Figures are those of one chip and step.

The last columns are a roofline: the times that the device's published rates (pretraining/extensions/devices.py) need
for the products, for the bytes to and from HBM and for the bytes sent, and the MFU if the longest of them were the
step. MFU counts all pairs of tokens in attention, of which the kernel computes half, so that it can be above 100 %.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from main_training import configure
from pretraining.config.training import TrainConfig
from pretraining.tools.plan.checks import topology_devices
from pretraining.tools.plan.compiled import CompiledStep, compile_step
from pretraining.tools.plan.plan import Plan, plan_of

CASE: dict[str, Any] = {
    "model_variant": "llama3_8b",
    "sharding_strategy": "fsdp",
    "fsdp_activation_checkpointing": True,
    "batch_size": 1,
    "seq_length": 4096,
    "plan": True,
    "plan_compile": True,
    "plan_device_kind": "tpu-v6e",
    "plan_topology": "4x4",
}
COLUMNS = (
    *("step", "tokens", "temporaries, GB", "peak, GB", "TFLOP", "in kernels", "HBM, GB", "sent, GB", "overlapped"),
    *("million cycles", "FLOP, ms", "HBM, ms", "links, ms", "MFU at most"),
)
MAXTEXT = Path(__file__).with_name("maxtext.json")


class Figures(NamedTuple):
    """One row of the table: bytes and operations of one device and step."""

    name: str
    tokens: int  # of a sequence
    temporaries: float
    peak: float
    flops: float
    kernel_flops: float
    hbm: float
    sent: float
    overlapped: float | None  # share of `sent`; None: not known
    cycles: float

    def row(self, plan: Plan) -> str:
        """Return the row, with the roofline on the plan's kind of device."""
        kind = plan.kind
        times = (self.flops / kind.device.peak_flops, self.hbm / kind.memory_rate, self.sent / kind.link)
        mfu = plan.least_seconds / max(times)
        overlapped = "n/a" if self.overlapped is None else f"{self.overlapped:.0%}"
        cells = [self.name, str(self.tokens), f"{self.temporaries / 1e9:.2f}", f"{self.peak / 1e9:.2f}"]
        cells += [f"{self.flops / 1e12:.1f}", f"{self.kernel_flops / 1e12:.1f}", f"{self.hbm / 1e9:.0f}"]
        cells += [f"{self.sent / 1e9:.1f}", overlapped, f"{self.cycles / 1e6:,.0f}"]
        cells += [f"{1e3 * time:.0f}" for time in times] + [f"{mfu:.0%}"]
        return f"| {' | '.join(cells)} |"


def figures_of(name: str, tokens: int, step: CompiledStep) -> Figures:
    """Return the figures of a compiled step."""
    temporaries, peak = (max(getattr(program, key) for program in step.programs) for key in ("temporaries", "peak"))
    sent = sum(step.sent.values())
    share = step.overlapped / sent if sent else None
    return Figures(name, tokens, temporaries, peak, step.flops, step.kernel_flops, step.hbm, sent, share, step.cycles)


def maxtext_figures(config: TrainConfig, kernel_flops: float) -> list[Figures]:
    """Return MaxText's figures of this case; its attention kernel is ours, so it counts as many operations."""
    tokens, recomputed, known = config.seq_length, config.fsdp_activation_checkpointing, json.loads(MAXTEXT.read_text())
    if any(getattr(config, name) != value for name, value in known["case"].items()):
        return []
    return [
        Figures(
            name="MaxText",
            tokens=tokens,
            temporaries=1e9 * step["temporaries_gb"],
            peak=1e9 * step["peak_gb"],
            flops=1e12 * step["tflop_without_kernels"] + kernel_flops,
            kernel_flops=kernel_flops,
            hbm=1e9 * step["hbm_gb"],
            sent=1e9 * step["sent_gb"],
            overlapped=None,
            cycles=1e6 * step["million_cycles"],
        )
        for step in known["steps"]
        if step["tokens"] == tokens and step["recomputed"] == recomputed
    ]


def print_figures(rows: list[Figures], plan: Plan, step: CompiledStep) -> None:
    """Print the table, and what the step sends."""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    print("\n".join(figures.row(plan) for figures in rows))
    print("\nSent by operation and dtype, GB:")
    for kind, count in sorted(step.sent_by_dtype.items(), key=lambda item: -item[1]):
        print(f"  {count / 1e9:8.2f}  {kind}")


def settings_of(description: str | None) -> dict[str, str]:
    """Return the settings on the command line, by name; --help prints the description."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, words = parser.parse_known_args()
    return dict(word.removeprefix("--").split("=", 1) for word in words)


def main() -> None:
    """Compile and print; see the module's docstring."""
    options = settings_of(__doc__)
    config = configure({**CASE, **options})
    plan = plan_of(replace(config, plan_devices=topology_devices(config)))
    name = ", ".join(f"{key}={value}" for key, value in options.items()) or "ours"
    step = compile_step(plan.config, plan.mesh.shard)
    ours, theirs = figures_of(name, config.seq_length, step), maxtext_figures(config, step.kernel_flops)
    print_figures([ours, *theirs], plan, step)
    if theirs:
        print(f"MaxText: {json.loads(MAXTEXT.read_text())['source']}")


if __name__ == "__main__":
    main()
