"""What a run reads from the environment before it reads anything else, and its signs of life at the start."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pretraining.config.flags import first_rank
from pretraining.monitor.progress import heartbeat
from pretraining.parallel.processes import read_processes
from pretraining.run.supervision import check_launch_time
from pretraining.storage import RETRIES


def check_environment() -> None:
    """Raise UserError if a variable of a launcher or of scripts/train.sh cannot be used."""
    read_processes()
    check_launch_time()


def starting() -> AbstractContextManager[None]:
    """Return a context in which process 0 prints a sign of life, and which storage it waits for."""
    return heartbeat("starting", shown=first_rank(), waiting=lambda: RETRIES.waiting)
