"""The line of a report: the same in a terminal and in a log file.

Pure functions of a record of metrics.jsonl. No colours, no carriage returns, columns of fixed width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pretraining.monitor.figures import duration, number, percent


def progress_line(record: Mapping[str, Any], num_steps: int) -> str:
    """Return step, percent, loss, learning rate, gradient norm, tokens/s, MFU (6N + 12LdS) and remaining time."""
    remaining = (num_steps - record["step"]) * record["step_time"]
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
        )
    )


def evaluation_line(record: Mapping[str, Any], num_steps: int) -> str:
    """Return step, percent and the loss on held-out data: "val_loss" or "test_loss"."""
    name, kind = ("val_loss", "validation") if "val_loss" in record else ("test_loss", "test")
    return f"{_position(record['step'], num_steps)}  {kind} loss {number(record[name], 7, 4)}"


def _position(step: int, num_steps: int) -> str:
    width = len(str(num_steps))
    share = math.floor(1000 * step / num_steps) / 10  # rounded down: only the last step is 100 %
    return f"step {step:>{width}}/{num_steps} {share:>5.1f}%"
