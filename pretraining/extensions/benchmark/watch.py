"""The summary of a benchmark: step time, speed, memory and compile time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pretraining.config.errors import counted
from pretraining.config.extension import Watcher
from pretraining.extensions.flops import Meter, training_flops
from pretraining.extensions.units import flop, size
from pretraining.monitor.figures import percent
from pretraining.run.reports import begins_rows
from pretraining.run.training_run import TrainingRun


class Benchmark(Watcher):
    """Prints the summary of a complete run, from the reports of its steps of full size that were not the first."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._step_times: list[float] = []  # seconds per step, one for each report

    def record(self, record: Mapping[str, Any]) -> None:
        """Keep the time of a step."""
        run, step, config = self._run, record["step"], self._run.config
        if "step_time" not in record or begins_rows(run, step):
            return
        tokens = round(record["tokens_per_second"] * record["step_time"])
        if (tokens, config.row_length(step)) == (config.tokens_per_step, config.seq_length):
            self._step_times.append(record["step_time"])

    def finish(self) -> None:
        """Print the summary, in process 0."""
        run, config, engine = self._run, self._run.config, self._run.engine
        flops, kind = training_flops(config, config.seq_length), config.device_kind(engine.device_name)
        meter = Meter(config.tokens_per_step, engine.mesh.size, flops, kind)
        first, compiles = run.account.seconds()["compile"], engine.compiles
        if first:
            run.print(summary(meter, self._step_times, engine.memory_bytes(), first, compiles=compiles))


def summary(
    meter: Meter, step_times: Sequence[float], memory_bytes: int | None, first: float, *, compiles: bool
) -> str:
    """Return step time, tokens/s, TFLOP/s, both MFUs, peak memory and compile time, as lines of text.

    step_times: seconds per step after the first one, one per report; a report that covers several steps gives their
    mean. memory_bytes: peak of the busiest device, None where it cannot say. first: seconds until the first step was
    done, with the compilation if the engine `compiles`.
    """
    memory, kind = "n/a" if memory_bytes is None else size(memory_bytes), meter.kind
    if memory_bytes is not None and kind and kind.memory:
        memory += f" of {size(kind.memory)}, {memory_bytes / kind.memory:.1%}"
    if not step_times:
        return _table([("first step", f"{first:.2f} s"), ("step time", "n/a (no step after the first)")])
    slow, median, fast = (statistics.quantiles([*step_times] * 2, n=10, method="inclusive")[at] for at in (8, 4, 0))
    speed = meter.speed(median)
    tokens = speed["tokens_per_second_per_device"] or 0.0
    full, causal = (tokens * count / 1e12 for count in meter.flops)
    peak = f"of {flop(kind.peak_flops)}/s, {kind.title}, dense {kind.dtype}" if kind else "peak unknown: --peak_tflops"
    done = f"{max(first - median, 0.0):.1f} s" if compiles else "none"
    return _table(
        [
            ("step time", f"{median:.4g} s (p10 {fast:.4g}, p90 {slow:.4g}) over {counted(len(step_times), 'report')}"),
            ("tokens/s", f"{speed['tokens_per_second']:,.0f} on {counted(meter.devices, 'device')}"),
            ("tokens/s/device", f"{tokens:,.0f}"),
            (
                "TFLOP/s/device",
                f"{full:.4g} ({causal:.4g} causal)",
            ),
            ("MFU (6N + 12LdS)", f"{percent(speed['mfu'])} ({peak})"),
            ("MFU (causal)", percent(speed["mfu_causal"])),
            ("peak memory", memory),
            ("compile time", f"{done} (first step {first:.1f} s)"),
        ]
    )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(["Benchmark summary", *(f"  {name:<{width}}  {value}" for name, value in rows)])
