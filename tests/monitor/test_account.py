"""The account of time: every second once, whatever kills a run and wherever it continues."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.monitor.account import Account, account_line, goodput, totals
from pretraining.monitor.metrics import cut_back, read_metrics

START = st.tuples(st.integers(1, 6), st.integers(0, 12), st.integers(0, 9), st.integers(0, 9))


@pytest.mark.slow
@given(st.lists(START, min_size=1, max_size=5))
def test_the_account_adds_up_to_the_time_since_the_first_start(starts: list[tuple[int, int, int, int]]) -> None:
    """Each start makes some steps of 1 s, is alive for a while after the last report, and is then missed."""
    with tempfile.TemporaryDirectory() as folder:
        path, now, newest = Path(folder) / "metrics.jsonl", 1000.0, 0
        for number, (steps, back, alive, missing) in enumerate(starts):
            step = max(newest - back, 1)  # of the checkpoint
            cut_back(path, step, now)
            with path.open("a") as file:
                for newest in range(step + 1, step + steps + 1):
                    now += 3
                    account = {"train": 1.0, "save": 0.5, "data_wait": 1.5, "time": now}
                    file.write(json.dumps({"step": newest, "account": account}) + "\n")
            os.utime(path, (now + alive, now + alive))
            seconds = totals(read_metrics(path))
            assert sum(seconds.values()) == pytest.approx(now - 1000)
            made = 3 * sum(start[0] for start in starts[: number + 1])
            assert seconds["save"] == pytest.approx(made / 6)
            assert seconds["train"] + seconds["data_wait"] <= 2.5 * newest
            now += alive + missing
        assert seconds["idle"] == sum(start[3] for start in starts[:-1])


def test_steps_that_are_made_again_are_lost_and_those_before_the_checkpoint_are_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines: list[dict[str, Any]] = [
        {"step": 2, "account": {"start": 9.0, "train": 4.0, "time": 100.0}},
        {"step": 4, "account": {"train": 4.0, "save": 1.0, "time": 105.0}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(path, (108, 108))
    cut_back(path, 2, 120.0)
    assert read_metrics(path) == [
        lines[0],
        {"step": 2, "account": {"lost": 7.0, "save": 1.0, "idle": 12.0, "time": 120.0}},
    ]
    seconds = totals(read_metrics(path))
    assert goodput(seconds) == 4 / 33
    assert account_line(seconds) == "goodput 12.1% of 33s: training 4s, saves 1s, starting 9s, lost steps 7s, idle 12s"


def test_the_time_between_a_complete_run_and_its_continuation_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for code, idle in ((0, 0.0), (143, 500.0)):
        path.write_text(json.dumps({"step": 4, "account": {"train": 4.0, "time": 100.0, "ended": code}}) + "\n")
        os.utime(path, (100, 100))
        cut_back(path, 4, 600.0)
        seconds = totals(read_metrics(path))
        assert (seconds["train"], seconds["idle"]) == (4.0, idle)


def test_an_activity_inside_another_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    for clock in ("time.time", "time.perf_counter"):
        monkeypatch.setattr(clock, lambda: now)
    account = Account()
    account.begin("train")
    with account.spending("validation"):
        now += 2
        with account.spending("save"):
            now += 4
        now += 1
    assert account.take() == {"validation": 3, "save": 4, "time": 7}
    now += 2
    assert account.take() == {"train": 2, "time": 9}
