"""When a run saves, and when it ends, by the clock. Depends on no engine."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from pretraining.extensions.clock.settings import ClockConfig
from pretraining.monitor.account import Account
from pretraining.run.interrupt import Clock


def launch_time(began: float) -> float:
    """Return when the script began, on time.monotonic(); without a script `began`, a second of the epoch.

    tools/launch sets LAUNCHED_AT, a second of the epoch, before its first start of the run.
    """
    age = time.time() - float(os.environ.get("LAUNCHED_AT") or began)
    return time.monotonic() - max(age, 0.0)


class Following(NamedTuple):
    """What follows a step."""

    validations: int  # after it and the next two
    saves: int  # after it and the next one, besides the last one of the run
    longest_save: float  # seconds until it was committed, so far


class WallClock(Clock):
    """The time at which a run ends, and the seconds after which it saves."""

    def __init__(self, config: ClockConfig, account: Account, following: Callable[[], Following]) -> None:
        """account: that of this start, with which it began. following: returns what follows the step of a reading."""
        self.reason = f"the time of --max_run_seconds={config.max_run_seconds} is up"
        self._ends_at = launch_time(account.began) + (config.max_run_seconds or math.inf)
        self._saves_every = config.checkpoint_seconds or math.inf  # from a save there, of whatever reason, to the next
        self._longest_validation = 0.0
        self._account, self._following = account, following
        self._before = account.seconds()  # at the last reading
        self._has_writer = getattr(config, "async_checkpointing", False)  # of an extension
        self._saved_at = -math.inf
        self._saves_at = time.monotonic() + self._saves_every

    def saved(self, is_local: bool) -> None:
        """Begin another interval between saves, unless the host alone has this one."""
        self._saved_at = time.monotonic()
        if not is_local:
            self._saves_at = self._saved_at + self._saves_every

    def read(self) -> tuple[bool, bool]:
        """See Clock. A save is asked for once in an interval.

        The end leaves time for two steps, because processes agree one step later, for what follows them, and for a save
        after one that a thread still writes; validations and saves are as long as the longest so far.
        """
        now, after = time.monotonic(), self._account.seconds()
        before, self._before = self._before, after
        step_time = sum(after[activity] - before[activity] for activity in ("train", "data_wait"))
        self._longest_validation = max(self._longest_validation, after["validation"] - before["validation"])
        validations, others, longest_save = self._following()
        steps_end = now + 2 * step_time + validations * self._longest_validation
        if self._has_writer:
            steps_end = max(steps_end, self._saved_at + longest_save)
        saves = now >= self._saves_at
        if saves:
            self._saves_at = math.inf  # until the loop has saved
        return steps_end + (others + 1) * longest_save >= self._ends_at, saves
