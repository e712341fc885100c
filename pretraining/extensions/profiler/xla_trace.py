"""A trace by torch-xla's profiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch_xla.debug.profiler as xp

from pretraining.parallel.xla.graph import wait_for_all


def start_xla_trace(folder: str) -> Callable[[], None]:
    """Start a profile of this process's devices; return what waits for them, stops it and writes it to `folder`."""
    with suppress(RuntimeError):  # raised unless an earlier run of this process ended within its trace
        xp.stop_trace()
    xp.start_trace(folder)

    def stop() -> None:
        wait_for_all()
        xp.stop_trace()

    return stop
