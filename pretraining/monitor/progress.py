"""What a run prints while it trains: the line of a report, and signs of life.

As a file has it: no colours, no carriage returns, columns of fixed width. TrainConfig.printed may change it for a
terminal.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pretraining.config.errors import counted
from pretraining.monitor.figures import duration, format_number, percent


def progress_line(record: Mapping[str, Any], num_steps: int, remaining: float) -> str:
    """Return step, percent, loss, learning rate, gradient norm, tokens/s, MFU (see extensions/mfu) and remaining time.

    remaining: seconds of the tokens after this step at its speed; infinite after a step that compiled, whose time says
    nothing of later ones.
    """
    return "  ".join(
        (
            position(record["step"], num_steps),
            f"loss {format_number(record['loss'], 7, 4)}",
            f"lr {record['learning_rate']:.2e}",
            *((f"grad norm {format_number(record['grad_norm'], 7, 3)}",) if "grad_norm" in record else ()),
            f"{record['tokens_per_second']:>9,.0f} tokens/s",
            f"MFU {percent(record.get('mfu'))}",
            f"ETA {duration(remaining) if math.isfinite(remaining) else 'n/a'}",
            *(("loss spike",) if record.get("loss_spike") else ()),
            *((f"{counted(int(record['outliers']), 'update')} skipped",) if record.get("outliers") else ()),
        )
    )


def position(step: int, num_steps: int) -> str:
    """Return "step 20/100  20.0%"."""
    share = math.floor(1000 * step / num_steps) / 10  # rounded down: only the last step is 100 %
    return f"step {step:>{len(str(num_steps))}}/{num_steps} {share:>5.1f}%"


@contextmanager
def heartbeat(label: str, every: float = 4.0, shown: bool = True) -> Iterator[None]:
    """While the body runs, print "<label> ... 20s" every `every` seconds; nothing if it is faster, or not `shown`."""
    if not shown:
        yield
        return
    done = threading.Event()
    start = time.monotonic()

    def beat() -> None:
        while not done.wait(every):
            print(f"{label} ... {duration(time.monotonic() - start)}", flush=True)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
