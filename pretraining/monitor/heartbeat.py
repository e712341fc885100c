"""A line every few seconds while something takes long and prints nothing, such as compilation."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pretraining.monitor.figures import duration


@contextmanager
def heartbeat(label: str, every: float = 10.0) -> Iterator[None]:
    """While the body runs, print "<label> ... 20s" every `every` seconds; nothing if it is faster."""
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
