"""Saves and ends of a run by the clock, and the end of a process whose step hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pretraining.config.extension import Extension
from pretraining.extensions.clock.settings import CHECKS, ClockConfig, check_launch_time

if TYPE_CHECKING:
    from pretraining.run.training_run import TrainingRun


def set_clock(run: TrainingRun) -> None:
    """Give process 0 a clock, on which the others rely, and every process a watchdog. The loop calls both."""
    config = cast(ClockConfig, run.config)
    if config.step_timeout:
        from pretraining.extensions.clock.watchdog import StepWatchdog

        run.watchdog = StepWatchdog(config.step_timeout)
    if run.leads and (config.max_run_seconds or config.checkpoint_seconds):
        from pretraining.extensions.clock.reading import Following, WallClock

        def following() -> Following:
            steps = range(run.step + 1, min(run.step + 3, config.num_steps) + 1)
            validations = sum(any(watcher.waits_after(step) for watcher in run.watchers) for step in steps)
            saves = sum(map(run.checkpoints.due, steps[:2]))
            return Following(validations, saves, run.checkpoints.longest_save)

        run.interrupt.clock = WallClock(config, run.account, following)


EXTENSION = Extension(configuration=ClockConfig, checks=CHECKS, inputs=(check_launch_time,), watch=set_clock)
