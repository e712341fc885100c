"""The account of time: what every second of a run was spent on, over restarts.

Records of metrics.jsonl have an "account": the seconds since the last one by activity, and "time", the second of the
epoch at its end. Together they are the time from the first start to the last record. Time that went into steps which a
restart makes again becomes "lost", and the time in which no process trained is "idle". Does not depend on torch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pretraining.monitor.figures import duration, percent

# Activity -> its name in the report, in the order of the report.
ACTIVITIES = {
    "train": "training",
    "compile": "first steps",  # of each start, with what they compile
    "data_wait": "waiting for data",
    "validation": "validation",
    "save": "saves",
    "restore": "restores",
    "start": "starting",
    "lost": "lost steps",
    "idle": "idle",
}
REPEATED = ("train", "data_wait", "validation")  # with the steps that a restart makes again
LONGEST = 1e10  # s; no time of the epoch is later, and no run longer


class Account:
    """The seconds that a process has spent on each activity. It begins with "start"."""

    def __init__(self) -> None:
        self.began = time.time()
        self._activity, self._since = "start", time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._taken: dict[str, float] = {}

    def begin(self, activity: str) -> None:
        now = time.perf_counter()
        self._seconds[self._activity] += now - self._since
        self._activity, self._since = activity, now

    @contextmanager
    def spending(self, activity: str) -> Iterator[None]:
        """Count the body as `activity`; afterwards the activity around it continues."""
        outer = self._activity
        self.begin(activity)
        try:
            yield
        finally:
            self.begin(outer)

    def seconds(self) -> defaultdict[str, float]:
        """Return the seconds of every activity so far."""
        self.begin(self._activity)
        return self._seconds.copy()

    def take(self) -> dict[str, float]:
        """Return the account of a record: the seconds since the last call, and the time."""
        before, self._taken = self._taken, self.seconds()
        spent = {activity: seconds - before.get(activity, 0.0) for activity, seconds in self._taken.items()}
        return {**{activity: seconds for activity, seconds in spent.items() if seconds}, "time": time.time()}


def is_account(value: object) -> bool:
    """Return whether `value`, read from a file, is an account."""
    if not isinstance(value, dict) or "time" not in value:
        return False
    return all(type(number) in (int, float) and 0 <= number < LONGEST for number in value.values())


def carried(records: Iterable[Mapping[str, Any]], step: int, alive: float, began: float) -> dict[str, float] | None:
    """Return the account with which a start that continues after `step` begins; None if there was none before.

    records: from the last one. The account replaces that of the records after `step`. alive: when the last start was
    certainly running, such as the time of the file; the time from its last record on is lost too, and the time from
    there until `began` is idle. The time between the end of a complete run and its continuation is not counted.
    """
    last: Mapping[str, float] | None = None
    seconds: defaultdict[str, float] = defaultdict(float)
    for record in records:
        account = record.get("account", {})
        last = last or account
        if last and record["step"] <= step:
            break
        for activity in account.keys() & ACTIVITIES:
            seconds["lost" if activity in REPEATED else activity] += account[activity]
    if not last:
        return None
    if last.get("ended") != 0:
        alive = min(max(alive, last["time"]), max(began, last["time"]))
        seconds["lost"] += alive - last["time"]
        seconds["idle"] += max(began - alive, 0.0)
    return {**seconds, "time": began}


def totals(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of every activity so far."""
    accounts = [record["account"] for record in records if "account" in record]
    return {activity: sum(account.get(activity, 0.0) for account in accounts) for activity in ACTIVITIES}


def goodput(seconds: Mapping[str, float]) -> float | None:
    """Return the share of the time that was training; None if there was no time."""
    total = sum(seconds.values())
    return seconds["train"] / total if total else None


def account_line(seconds: Mapping[str, float]) -> str:
    """Return goodput, the whole time and its parts, without those under a second."""
    parts = (f"{name} {duration(seconds[activity])}" for activity, name in ACTIVITIES.items() if seconds[activity] >= 1)
    whole = f"goodput {percent(goodput(seconds))} of {duration(sum(seconds.values()))}"
    return f"{whole}: {', '.join(parts) or 'under a second each'}"
