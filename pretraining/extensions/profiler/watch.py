"""The watcher that traces."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pretraining.config.extension import Watcher
from pretraining.extensions.profiler.settings import ProfilerConfig
from pretraining.extensions.profiler.trace import start_trace
from pretraining.run.training_run import TrainingRun

MEMORY_EVENTS = 100_000  # kept allocations and frees: some steps of a small model, about 100 MB of file


class Profiler(Watcher):
    """Traces profile_num_steps steps from profile_start_step on; a run that continues after it traces none."""

    def __init__(self, run: TrainingRun, config: ProfilerConfig) -> None:
        self._run, self._config = run, config
        self._first = config.profile_start_step
        self._last = min(self._first + config.profile_num_steps - 1, config.num_steps)
        self._is_traced = run.start_step < self._first
        self._traces = self._is_traced and not (config.profiler_rank0_only and run.engine.process_index)
        self._folder = config.run_folder / "profile"
        self._stop: Callable[[], None] | None = None  # ends the trace that has begun

    def before_step(self, step: int) -> None:
        """Begin the trace."""
        if self._traces and step == self._first:
            self._stop = start_trace(self._run.engine, str(self._folder))
            if self._config.memory_profiling:
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)

    def waits_after(self, step: int) -> bool:
        """Return whether the trace ends after `step`, in this process or in process 0."""
        return self._is_traced and step == self._last

    def after_step(self, step: int) -> None:
        """End the trace."""
        if self._stop and step == self._last:
            self._stop()
            self._stop = None
            if self._config.memory_profiling:
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / f"memory_{self._run.engine.process_index}.pickle"
                torch.cuda.memory._dump_snapshot(str(path))  # for pytorch.org/memory_viz
                torch.cuda.memory._record_memory_history(enabled=None)
            self._run.print(f"trace written to {self._folder}")

    def close(self) -> None:
        """Say that a trace which has begun is not written, and record no more of the memory."""
        if self._stop:
            if self._config.memory_profiling:
                torch.cuda.memory._record_memory_history(enabled=None)
            steps = f"steps {self._first} to {self._last}"
            self._run.print(f"no trace written: the run ended within {steps}; set a later --profile_start_step")
