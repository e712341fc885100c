"""Notices of GCE and EC2 that this host is about to be taken away: the run saves and leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretraining.config.extension import Extension

if TYPE_CHECKING:
    from pretraining.extensions.preemption.watch import NoticeWatch
    from pretraining.run.training_run import TrainingRun


def watch(run: TrainingRun) -> NoticeWatch:
    """Return what asks for notices."""
    from pretraining.extensions.preemption.watch import NoticeWatch

    return NoticeWatch(run.interrupt.notice)


EXTENSION = Extension(watch=watch)
