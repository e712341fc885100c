"""What a run prints while it trains: the line of a report, signs of life, and the summary of a benchmark.

The same in a terminal and in a log file: no colours, no carriage returns, columns of fixed width.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pretraining.config.errors import counted
from pretraining.monitor.figures import duration, flop, number, percent, size
from pretraining.monitor.flops import Meter


def progress_line(record: Mapping[str, Any], num_steps: int, steps_left: float | None = None) -> str:
    """Return step, percent, loss, learning rate, gradient norm, tokens/s, MFU (6N + 12LdS) and remaining time.

    steps_left: the tokens after this step as a number of steps like this one, where later ones have more.
    """
    remaining = (num_steps - record["step"] if steps_left is None else steps_left) * record["step_time"]
    return "  ".join(
        (
            _position(record["step"], num_steps),
            f"loss {number(record['loss'], 7, 4)}",
            f"lr {record['learning_rate']:.2e}",
            *((f"grad norm {number(record['grad_norm'], 7, 3)}",) if "grad_norm" in record else ()),
            f"{record['tokens_per_second']:>9,.0f} tokens/s",
            f"MFU {percent(record['mfu'])}",
            f"ETA {duration(remaining)}",
            *(("loss spike",) if record["loss_spike"] else ()),
            *((f"{counted(int(record['outliers']), 'update')} skipped",) if record.get("outliers") else ()),
        )
    )


def evaluation_line(record: Mapping[str, Any], num_steps: int) -> str:
    """Return step, percent and the losses on held-out data, "val_loss" or "test_loss", with bits per byte if known."""
    name, kind = ("val", "validation") if "val_loss" in record else ("test", "test")
    parts = [f"{_position(record['step'], num_steps)}  {kind} loss {number(record[f'{name}_loss'], 7, 4)}"]
    if f"{name}_bits_per_byte" in record:
        parts.append(f"{number(record[f'{name}_bits_per_byte'], 6, 4)} bits/byte")
    of_dataset = f"{name}_loss/"
    losses = {key.removeprefix(of_dataset): loss for key, loss in record.items() if key.startswith(of_dataset)}
    return "  ".join([*parts, *(f"{dataset} {number(loss, 7, 4)}" for dataset, loss in losses.items())])


def questions_line(record: Mapping[str, Any], num_steps: int) -> str:
    """Return step, percent and the accuracies on multiple-choice questions, plain and normalized."""
    plain = {key.removeprefix("eval_acc/"): key for key in record if key.startswith("eval_acc/")}
    figures = (f"{name} {record[key]:.4f} ({record[f'eval_acc_norm/{name}']:.4f})" for name, key in plain.items())
    return f"{_position(record['step'], num_steps)}  accuracy (normalized)  {'  '.join(figures)}"


def _position(step: int, num_steps: int) -> str:
    width = len(str(num_steps))
    share = math.floor(1000 * step / num_steps) / 10  # rounded down: only the last step is 100 %
    return f"step {step:>{width}}/{num_steps} {share:>5.1f}%"


@contextmanager
def heartbeat(
    label: str, every: float = 4.0, shown: bool = True, waiting: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """While the body runs, print "<label> ... 20s" every `every` seconds; nothing if it is faster, or not `shown`.

    waiting: returns what is waited for, which the line then names.
    """
    if not shown:
        yield
        return
    done = threading.Event()
    start = time.monotonic()

    def beat() -> None:
        while not done.wait(every):
            name = f"{label}: {waits}" if (waits := waiting()) else label
            print(f"{name} ... {duration(time.monotonic() - start)}", flush=True)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


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
    peak = f"of {flop(kind.peak_flops)}/s, {kind.title}, dense {kind.dtype}" if kind else "peak unknown"
    rows = [
        ("median step", f"{median:.4g} s over {counted(len(step_times), 'report')}"),
        ("tokens/s", f"{speed['tokens_per_second']:,.0f} on {counted(meter.devices, 'device')}"),
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
