"""A trace by the profiler of each engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import profile, supported_activities, tensorboard_trace_handler

from pretraining.parallel.accelerator import HOST


def start_trace(engine: Any, folder: str) -> Callable[[], None]:
    """Start a profile of this process's devices; return what stops it and writes it for TensorBoard to `folder`.

    engine: a parallel.engine.Engine.
    """
    if engine.name == "xla":
        from pretraining.extensions.profiler.xla_trace import start_xla_trace

        return start_xla_trace(folder)
    handler = tensorboard_trace_handler(folder, worker_name=f"process_{engine.process_index}")
    trace = profile(activities=supported_activities(), on_trace_ready=handler)
    trace.start()

    def stop() -> None:
        if engine.device != HOST:
            torch.accelerator.synchronize()
        trace.stop()

    return stop
