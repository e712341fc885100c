"""When a run saves, and when it ends, by the clock. Depends on no engine."""

from __future__ import annotations

import math
import os
import time

from pretraining.extensions.clock.settings import ClockConfig
from pretraining.run.interrupt import Clock


def launch_time(began: float) -> float:
    """Return when the script began, on time.monotonic(); without a script `began`, a second of the epoch.

    tools/launch sets LAUNCHED_AT, a second of the epoch, before its first start of the run.
    """
    age = time.time() - float(os.environ.get("LAUNCHED_AT") or began)
    return time.monotonic() - max(age, 0.0)


class WallClock(Clock):
    """The time at which a run ends, and the seconds after which it saves."""

    def __init__(self, config: ClockConfig, began: float) -> None:
        """began: second of the epoch at which this start began."""
        self.reason = f"the time of --max_run_seconds={config.max_run_seconds} is up"
        self._ends_at = launch_time(began) + (config.max_run_seconds or math.inf)
        self._saves_every = config.checkpoint_seconds or math.inf  # from one save, of whatever reason, to the next
        self._longest_save = 0.0
        self._last_read: float | None = None
        self._saves_at = time.monotonic() + self._saves_every

    def saved(self, seconds: float) -> None:
        """Begin another interval between saves."""
        self._longest_save = max(self._longest_save, seconds)
        self._last_read = time.monotonic()
        self._saves_at = self._last_read + self._saves_every

    def read(self) -> tuple[bool, bool]:
        """See Clock. A save is asked for once in an interval.

        The end leaves time for two steps, because processes agree one step later, and for the longest save so far.
        """
        now = time.monotonic()
        step_time = now - self._last_read if self._last_read else 0.0
        self._last_read = now
        saves = now >= self._saves_at
        if saves:
            self._saves_at = math.inf  # until the loop has saved
        return now + 2 * step_time + self._longest_save >= self._ends_at, saves
