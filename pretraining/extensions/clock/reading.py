"""When a run saves, and when it ends, by the clock. Depends on no engine."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from pretraining.extensions.clock.settings import ClockConfig
from pretraining.monitor.account import Account
from pretraining.run.interrupt import Clock


def launch_time(began: float) -> float:
    """Return when the script began, on time.monotonic(); without a script `began`, a second of the epoch.

    tools/launch sets LAUNCHED_AT, a second of the epoch, before its first start of the run.
    """
    age = time.time() - float(os.environ.get("LAUNCHED_AT") or began)
    return time.monotonic() - max(age, 0.0)


class WallClock(Clock):
    """The time at which a run ends, and the seconds after which it saves."""

    def __init__(self, config: ClockConfig, account: Account, validations: Callable[[], int]) -> None:
        """account: that of this start, with which it began. validations: how many follow this step and the next two."""
        self.reason = f"the time of --max_run_seconds={config.max_run_seconds} is up"
        self._ends_at = launch_time(account.began) + (config.max_run_seconds or math.inf)
        self._saves_every = config.checkpoint_seconds or math.inf  # from one save, of whatever reason, to the next
        self._longest_save = self._longest_validation = 0.0
        self._account, self._validations = account, validations
        self._before: dict[str, float] | None = None  # the account at the last reading
        self._saves_at = time.monotonic() + self._saves_every

    def saved(self, seconds: float) -> None:
        """Begin another interval between saves."""
        self._longest_save = max(self._longest_save, seconds)
        self._saves_at = time.monotonic() + self._saves_every

    def read(self) -> tuple[bool, bool]:
        """See Clock. A save is asked for once in an interval.

        The end leaves time for two steps, because processes agree one step later, for validations that follow them, and
        for a save; both as long as the longest so far.
        """
        now, after = time.monotonic(), self._account.seconds()
        before, self._before = self._before or after, after
        step_time = sum(after[activity] - before[activity] for activity in ("train", "data_wait"))
        self._longest_validation = max(self._longest_validation, after["validation"] - before["validation"])
        left = 2 * step_time + self._validations() * self._longest_validation + self._longest_save
        saves = now >= self._saves_at
        if saves:
            self._saves_at = math.inf  # until the loop has saved
        return now + left >= self._ends_at, saves
