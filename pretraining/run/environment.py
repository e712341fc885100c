"""The signs of life of a run at its start."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pretraining.config.flags import first_rank
from pretraining.monitor.progress import heartbeat
from pretraining.storage import RETRIES


def starting() -> AbstractContextManager[None]:
    """Return a context in which process 0 prints a sign of life, and which storage it waits for."""
    return heartbeat("starting", shown=first_rank(), waiting=lambda: RETRIES.waiting)
