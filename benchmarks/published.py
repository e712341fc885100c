"""Compare the speed that the plan predicts with published runs: tokens per second and device.

    python -m benchmarks.published

The efficiencies of a100-80 and h100 were fitted to the first two rows; the other rows are predictions. Where a source
does not state the batch (MaxText, NxD), one is assumed, and if it recomputes anything, recomputation of every block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pretraining.tools.plan.plan import plan_of
from pretraining.tools.plan.settings import PlanConfig


class Published(NamedTuple):
    """A run that its authors published."""

    source: str
    speed: float  # tokens per second and device
    fields: dict[str, Any]


RECOMPUTED: dict[str, Any] = {"fsdp_activation_checkpointing": True}
A_THIRD: dict[str, Any] = {**RECOMPUTED, "selective_checkpointing": "1/3"}
SPLIT: dict[str, Any] = {"tensor_parallel_size": 8, **RECOMPUTED}


def run(
    source: str, speed: float, model: str, strategy: str, devices: int, kind: str, rows: int, length: int, **more: Any
) -> Published:
    """Build a row from the settings that every source states."""
    fields = {
        **{"model_variant": model, "sharding_strategy": strategy, "plan_devices": devices, "plan_device_kind": kind},
        **{"batch_size": rows, "seq_length": length, **more},
    }
    return Published(source, speed, fields)


RUNS = (
    run("fms-fsdp, README", 4550, "llama2_7b", "hsdp", 128, "a100-80", 2, 4096),
    run("fms-fsdp, README", 9600, "llama2_7b", "hsdp", 96, "h100", 2, 4096),
    run("fms-fsdp, README", 2150, "llama2_13b", "fsdp", 128, "a100-80", 2, 4096, **A_THIRD),
    run("fms-fsdp, README", 4850, "llama2_13b", "fsdp", 96, "h100", 2, 4096, **A_THIRD),
    run("fms-fsdp, README", 890, "llama2_70b", "fsdp", 96, "h100", 2, 4096, **RECOMPUTED),
    run("torchtitan, benchmarks 2024-12", 6667, "llama3_8b", "fsdp", 8, "h100", 2, 8192),
    run("torchtitan, benchmarks 2024-12", 6514, "llama3_8b", "fsdp", 128, "h100", 2, 8192),
    run("torchtitan, asyncTP 2025-06", 597, "llama3_70b", "fsdp", 256, "h100", 16, 8192, **SPLIT),
    run("MaxText, tiering.md", 692, "llama2_70b", "fsdp", 512, "tpu-v5p", 4, 4096, **RECOMPUTED),
    run("MaxText, tiering.md", 7207, "llama3_8b", "fsdp", 256, "tpu-v6e", 3, 8192, **RECOMPUTED),
    run("MaxText, tiering.md", 960, "llama3_70b", "fsdp", 256, "tpu-v6e", 2, 8192, **RECOMPUTED),
    run(
        "NxD Training, awsdocs-neuron", 336, "llama3_8b", "zero1", 1024, "trn1", 1, 8192,
        tensor_parallel_size=32, sequence_parallel=True, global_batch_size=1024, **RECOMPUTED,
    ),
)  # fmt: skip


def main() -> None:
    """Print the table; see the module's docstring."""
    print("| source | model | devices | published | plan | plan / published |")
    print("|---|---|---|---|---|---|")
    for source, speed, fields in RUNS:
        plan = plan_of(PlanConfig(plan=True, **fields))
        planned = plan.config.tokens_per_step / plan.step_seconds / plan.config.plan_devices
        devices = f"{fields['model_variant']} | {plan.config.plan_devices} {plan.kind.device.name}"
        print(f"| {source} | {devices} | {speed:,.0f} | {planned:,.0f} | {planned / speed:.2f} |")


if __name__ == "__main__":
    main()
