"""A trace of some steps by the engine's own profiler, and which code allocates memory in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pretraining.config.extension import Extension
from pretraining.extensions.profiler.settings import CHECKS, ProfilerConfig, check_first_step

if TYPE_CHECKING:
    from pretraining.extensions.profiler.watch import Profiler
    from pretraining.run.training_run import TrainingRun


def watch(run: TrainingRun) -> Profiler | None:
    """Return what traces, where a trace is asked for."""
    config = cast(ProfilerConfig, run.config)
    if not config.use_profiler:
        return None
    from pretraining.extensions.profiler.watch import Profiler

    return Profiler(run, config)


EXTENSION = Extension(
    configuration=ProfilerConfig,
    checks=CHECKS,
    opened=check_first_step,
    watch=watch,
    switches={"use_profiler": ("profile_start_step", "profile_num_steps")},
)
