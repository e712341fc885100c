"""What a watcher computes between two steps, such as a validation: a signal ends it, and the next start makes it.

It could take longer than the host has until it is taken away, and the step before it is saved after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

import torch.distributed as dist

from pretraining.monitor.metrics import FILE_NAME, latest_records
from pretraining.run.training_run import TrainingRun


class LeftError(Exception):
    """A signal came."""


def leave_after_signal(run: TrainingRun) -> None:
    """Raise LeftError in every process if one has received a signal."""
    if run.interrupt.agreed_now():
        raise LeftError


@contextmanager
def until_signal(run: TrainingRun, what: str) -> Iterator[None]:
    """Leave the block at a LeftError, after which the loop saves and makes no step. what: what is left."""
    interrupt, plan = run.interrupt, run.interrupt.plan
    if run.step == run.start_step:  # which may be within the compilations before the first step
        interrupt.plan = "leaving"
    try:
        yield
    except LeftError:
        interrupt.is_leaving = True
        run.print(f"{what}: left after a signal; the same command makes up for it")
    finally:
        interrupt.plan = plan
        run.watchdog.rest()


def has_figures(run: TrainingRun, name: str) -> bool:
    """Return whether metrics.jsonl has a figure `name` of the last step that was made; the same in every process."""
    found = [False]
    if run.metrics:
        latest = latest_records(run.config.run_folder / FILE_NAME)
        found = [any(name in record for record in takewhile(lambda record: record["step"] == run.step, latest))]
    if run.engine.process_count > 1:
        dist.broadcast_object_list(found, src=0)
    return found[0]
