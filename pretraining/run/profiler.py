"""A trace of some steps, for the engine's own profiler."""

from __future__ import annotations

from pretraining.config.extension import Watcher
from pretraining.run.training_run import TrainingRun


class Profiler(Watcher):
    """Traces profile_num_steps steps from profile_start_step on; a run that continues after it traces none."""

    def __init__(self, run: TrainingRun) -> None:
        config, self._run = run.config, run
        self._first = config.profile_start_step
        self._last = min(self._first + config.profile_num_steps - 1, config.num_steps)
        writes = config.use_profiler and not (config.profiler_rank0_only and run.engine.process_index)
        self._traces = writes and run.start_step < self._first
        self._folder = config.run_folder / "profile"

    def before_step(self, step: int) -> None:
        """Begin the trace."""
        if self._traces and step == self._first:
            self._run.engine.start_trace(str(self._folder))

    def after_step(self, step: int) -> None:
        """End the trace."""
        if self._traces and step == self._last:
            self._run.engine.stop_trace()
            self._run.print(f"trace written to {self._folder}")
