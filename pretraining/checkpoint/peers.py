"""The processes that save and load together: they wait for each other, and fail together.

One process alone needs no process group. Several use a gloo group of their own, so that a save in the background
never meets the training's collectives. While they read and write, a thread of each gives the others a sign of life: a
slow disk is waited for, and a host that is gone is noticed as soon as in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from pretraining.checkpoint.files import UnreadableError
from pretraining.config.errors import UserError
from pretraining.storage import StorageError, UnreachableError

T = TypeVar("T")
SLOWEST = 1800.0  # s that one process may read or write longer than another, both with signs of life
BEAT = 5.0  # s between signs of life


@dataclass(frozen=True)
class Failure:
    """An error on its way to the other processes."""

    kind: type[Exception]
    text: str


class Peers:
    """This process among those that save and load together."""

    def __init__(self, together: bool | None = None, timeout: int = 600) -> None:
        """Collective over the default group, if there is one. together=False: this process alone.

        timeout: seconds without a sign of life after which a process is lost.
        """
        if together is None:
            together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo") if together else None
        self._beat = min(BEAT, timeout / 4)
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which prints and commits."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print a line, once."""
        if self.leads:
            print(text, flush=True)

    def agree(self, act: Callable[[], T]) -> list[T]:
        """Run `act` in every process; all results in process 0, an empty list elsewhere.

        If it fails anywhere it fails everywhere: with its own error where it happened, and with that error's text in
        the other processes.
        """
        if self._group is None:
            return [act()]
        outcome, error = self._together(act)
        gathered: list[Any] = [None] * self.size
        dist.gather_object(outcome, gathered if self.leads else None, dst=0, group=self._group)
        failure = [_first_failure(gathered) if self.leads else None]
        dist.broadcast_object_list(failure, src=0, group=self._group)
        _raise(error, failure[0])
        return gathered if self.leads else []

    def each(self, act: Callable[[], T]) -> T:
        """Run `act` in every process; its own result in each. If it fails anywhere it fails everywhere."""
        results: list[T] = []
        self.agree(lambda: results.append(act()))
        return results[0]

    def lead(self, act: Callable[[], T]) -> T:
        """Run `act` in process 0; its result, or its error, in every one."""
        return self.deal(lambda: [act()] * self.size)

    def deal(self, act: Callable[[], list[T]]) -> T:
        """Run `act` in process 0; element i of its result, or its error, in process i."""
        if self._group is None:
            return act()[0]
        outcome, error = self._together(act if self.leads else list)
        results = outcome if isinstance(outcome, list) else [outcome] * self.size
        own: list[Any] = [None]
        dist.scatter_object_list(own, results if self.leads else None, src=0, group=self._group)
        _raise(error, own[0])
        return cast(T, own[0])

    def _together(self, act: Callable[[], T]) -> tuple[T | Failure, Exception | None]:
        """Run `act`; return its outcome when every process has run its own. Raises RuntimeError if one is lost."""
        ended = Event()
        with ThreadPoolExecutor(1, thread_name_prefix="peers") as pool:
            signs = pool.submit(self._give_signs_of_life, ended)
            try:
                outcome = _attempt(act)
            finally:
                ended.set()
            signs.result()
        return outcome

    def _give_signs_of_life(self, ended: Event) -> None:
        """Tell the others again and again whether this process has ended its part, until all have."""
        ended_at = None
        while True:
            if ended.wait(self._beat) and ended_at is None:
                ended_at = time.monotonic()
            running = torch.tensor(int(ended_at is None))
            dist.all_reduce(running, group=self._group)
            if not running:
                return
            if ended_at is not None and time.monotonic() > ended_at + SLOWEST:
                raise RuntimeError(f"gloo: {int(running)} processes read or write since {SLOWEST / 60:.0f} minutes")


def _attempt(act: Callable[[], T]) -> tuple[T | Failure, Exception | None]:
    try:
        return act(), None
    except Exception as error:  # whatever it is, the others wait to hear of it; `_raise` raises it again
        kinds = (UnreadableError, UnreachableError, StorageError, UserError, OSError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
        return Failure(kind, str(error)), error


def _raise(error: Exception | None, outcome: Any) -> None:
    """Raise this process's own error, or that of another process."""
    if error is not None:
        raise error
    if isinstance(outcome, Failure):
        raise outcome.kind(outcome.text)


def _first_failure(outcomes: list[Any]) -> Failure | None:
    failures = ((rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure))
    return next((Failure(failure.kind, f"{failure.text} (process {rank})") for rank, failure in failures), None)
