"""A sign of life while something takes minutes and says nothing: compiling, above all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pretraining.monitor.figures import duration


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)


@contextmanager
def heartbeat(label: str, every: float = 10.0, tell: Callable[[str], None] = say) -> Iterator[None]:
    """While the body runs, tell "<label> ... 20s" after every `every` seconds; nothing if it is quicker."""
    done = threading.Event()
    start = time.monotonic()

    def beat() -> None:
        while not done.wait(every):
            tell(f"{label} ... {duration(time.monotonic() - start)}")

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
