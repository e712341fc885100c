"""The summary of a benchmark run: medians over the steps that did not compile."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pretraining.monitor.figures import flop, percent, size
from pretraining.monitor.flops import Meter


def summary(meter: Meter, first_step: float, step_times: Sequence[float], memory_bytes: int | None) -> str:
    """Return median step time, tokens/s, both MFUs, peak memory and compile time, as lines of text.

    first_step: seconds of the step that compiled. step_times: seconds per step after it, one per report; a report
    that covers several steps gives their mean. memory_bytes: peak of the busiest device, None where it cannot say.
    """
    memory = "n/a" if memory_bytes is None else size(memory_bytes)
    if not step_times:
        rows = [("first step, compiling", f"{first_step:.2f} s"), ("median step", "n/a (no step after the first)")]
        return _table([*rows, ("peak memory", memory)])
    median = statistics.median(step_times)
    speed = meter.speed(median)
    kind = meter.kind
    peak = f"of {flop(kind.peak_flops)}/s, {kind.title}, dense bf16" if kind else "peak unknown"
    rows = [
        ("median step", f"{median:.4g} s over {len(step_times)} reports"),
        ("tokens/s", f"{speed['tokens_per_second']:,.0f} on {meter.devices} devices"),
        ("tokens/s/device", f"{speed['tokens_per_second_per_device']:,.0f}"),
        ("MFU (6N + 12LdS)", f"{percent(speed['mfu'])} ({peak})"),
        ("MFU (causal)", percent(speed["mfu_causal"])),
        ("peak memory", memory),
        ("compile time", f"{max(first_step - median, 0.0):.1f} s (first step {first_step:.1f} s)"),
    ]
    return _table(rows)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(["Benchmark summary", *(f"  {name:<{width}}  {value}" for name, value in rows)])
