"""The processes that save and load together: they wait for each other, and fail together.

One process alone needs no process group. Several use a gloo group of their own, so that a save in the background
never meets the training's collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from pretraining.checkpoint.files import UnreadableError
from pretraining.config.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An error on its way to the other processes."""

    kind: type[Exception]
    text: str


class Peers:
    """This process among those that hold the model."""

    def __init__(self, together: bool | None = None) -> None:
        """Collective: every process of the default group, if there is one. together=False: this process alone."""
        if together is None:
            together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if together else None
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that speaks and commits."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print a line, once."""
        if self.leads:
            print(text, flush=True)

    def agree(self, act: Callable[[], T]) -> list[T]:
        """Run `act` in every process; all results in the first one, an empty list elsewhere.

        If it fails anywhere it fails everywhere: with its own error where it happened, and with that error's text in
        the other processes.
        """
        if self._group is None:
            return [act()]
        outcome, own = _attempt(act)
        gathered: list[Any] = [None] * self.size
        dist.gather_object(outcome, gathered if self.leads else None, dst=0, group=self._group)
        failed = self._share(_first_failure(gathered) if self.leads else None)
        if own is not None:
            raise own
        if failed is not None:
            raise failed.kind(failed.text)
        return gathered if self.leads else []

    def lead(self, act: Callable[[], T]) -> T:
        """Run `act` in the first process; its result, or its error, in every one."""
        if self._group is None:
            return act()
        own = None
        outcome: Any = None
        if self.leads:
            outcome, own = _attempt(act)
        shared: T | Failure = self._share(outcome)
        if own is not None:
            raise own
        if isinstance(shared, Failure):
            raise shared.kind(shared.text)
        return shared

    def deal(self, act: Callable[[], list[T]]) -> T:
        """Run `act` in the first process; element i of its result, or its error, in process i."""
        if self._group is None:
            return act()[0]
        hands: list[Any] = []
        own = None
        if self.leads:
            outcome, own = _attempt(act)
            hands = [outcome] * self.size if isinstance(outcome, Failure) else outcome
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, hands if self.leads else None, src=0, group=self._group)
        if own is not None:
            raise own
        if isinstance(mine[0], Failure):
            raise mine[0].kind(mine[0].text)
        return cast(T, mine[0])

    def _share(self, value: Any) -> Any:
        boxed = [value]
        dist.broadcast_object_list(boxed, src=0, group=self._group)
        return boxed[0]


def _attempt(act: Callable[[], T]) -> tuple[T | Failure, Exception | None]:
    try:
        return act(), None
    except Exception as error:  # whatever it is, the others wait to hear of it; it is raised again in `agree`
        kind = next((kind for kind in (UnreadableError, UserError, OSError) if isinstance(error, kind)), RuntimeError)
        return Failure(kind, str(error)), error


def _first_failure(outcomes: list[Any]) -> Failure | None:
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Failure):
            return Failure(outcome.kind, f"{outcome.text} (process {rank})")
    return None
