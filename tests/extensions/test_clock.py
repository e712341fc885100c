"""Saves and ends by the clock, and the time at which a launcher began."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("pretraining.extensions.clock")

from main_training import CONFIGURATION
from pretraining.config.declaration import settings_of
from pretraining.config.errors import UserError
from pretraining.extensions.clock import set_clock
from pretraining.extensions.clock.reading import Following, WallClock
from pretraining.extensions.clock.settings import check_launch_time
from pretraining.extensions.clock.watchdog import StepWatchdog
from pretraining.monitor.account import Account
from tests.end_to_end.small import reports
from tests.parallel.launch import environment
from tests.parallel.test_torch_runs import ON_TORCH, train_command
from tests.processes import start


@pytest.mark.parametrize("text", ["garbage", "nan", "1e999"])
def test_a_time_of_the_launch_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGURATION()
    check_launch_time(config)
    monkeypatch.setenv("LAUNCHED_AT", text)
    with pytest.raises(UserError, match=f"LAUNCHED_AT={text} in the environment: not a number of seconds: unset it"):
        check_launch_time(config)


NEVER = range(0)


@pytest.mark.parametrize(
    ("validated", "saved", "has_writer", "last"),
    [
        (range(10, 11), NEVER, False, 206),
        (range(1, 1000), NEVER, False, 6),
        (range(6, 1000, 6), NEVER, False, 40),
        (range(0, 1000, 206), NEVER, False, 204),  # the one before the first step says how long it takes
        (NEVER, range(40, 41), False, 142),
        (NEVER, range(40, 1000, 80), False, 119),  # the next save would be followed by the last one
        (NEVER, range(40, 41), True, 190),
        (NEVER, range(40, 1000, 120), True, 159),
        (NEVER, range(40, 1000, 100), True, 190),
    ],
)
def test_the_end_leaves_time_for_two_steps_for_what_follows_them_and_for_the_last_save(
    validated: range, saved: range, has_writer: bool, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.delenv("LAUNCHED_AT", raising=False)
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now)
    config = CONFIGURATION(max_run_seconds=30)
    vars(config).update(async_checkpointing=has_writer)  # of another extension
    account, interrupt, checkpoints, written = Account(), SimpleNamespace(), SimpleNamespace(longest_save=0.0), now
    watchers, checkpoints.due = [SimpleNamespace(waits_after=validated.__contains__)], saved.__contains__
    run: Any = SimpleNamespace(
        **{"leads": True, "config": config, "account": account, "step": 0, "watchers": watchers},
        **{"interrupt": interrupt, "checkpoints": checkpoints},
    )
    set_clock(run)
    account.begin("train")
    ends = False
    while not ends:
        if run.step in validated:
            with account.spending("validation"):
                now += 4.0
        if run.step in saved:
            written = max(now, written) + 6.0
            now = now if has_writer else written
            interrupt.clock.saved(is_local=False)
        now += 0.125  # a step
        checkpoints.longest_save = 6.0 if now >= written > 1000 else checkpoints.longest_save
        ends, _ = interrupt.clock.read()
        run.step += 1
    now += 4.0 * (run.step in validated)
    assert (run.step, max(now, written) + checkpoints.longest_save <= 1030) == (last, True)


def test_a_save_for_the_host_alone_does_not_put_off_the_next_one_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seconds = 0.0, list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = WallClock(CONFIGURATION(checkpoint_seconds=10), Account(), lambda: Following(0, 0, 0.0))
    for now in range(1, 35):
        _, saves = clock.read()
        clock.saved(is_local=not saves)
        seconds += [now] * saves
    assert seconds == [10, 20, 30]


def test_a_watchdog_needs_no_file_behind_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # as in some notebooks
    watchdog = StepWatchdog(1000)
    watchdog.expect(first=True)
    watchdog.close()


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*[0-9]"))


@pytest.mark.slow
def test_the_clock_saves_and_ends_a_run_that_continues_bitwise(tmp_path: Path) -> None:
    """Killed after a save by the clock, then ended by the clock, in two processes that agree."""
    codes, metrics = tmp_path / "codes", tmp_path / "metrics.jsonl"
    codes.mkdir()
    more = {**ON_TORCH, "num_steps": 100_000, "checkpoint_interval": 100_000, "checkpoint_seconds": 1}
    if "ckpt_local_path" in settings_of(CONFIGURATION):
        more |= {"ckpt_local_path": tmp_path / "local", "ckpt_local_interval": 1}

    variables = environment(EXIT_CODES=str(codes))
    run = start(train_command(tmp_path, 2, **more), env=variables)
    while not (saved := checkpoint_steps(tmp_path)) or not metrics.exists() or max(reports(tmp_path)) < saved[-1] + 3:
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)
    for process in psutil.Process(run.pid).children():
        process.kill()
    run.communicate(timeout=60)
    newest, before = checkpoint_steps(tmp_path)[-1], reports(tmp_path)

    more["max_run_seconds"] = 1  # a step is made even if its start takes longer
    run = start(train_command(tmp_path, 2, **more), env=variables)
    said, _ = run.communicate(timeout=600)
    assert sorted(file.read_text() for file in codes.iterdir()) == ["4", "4"], said
    assert "the time of --max_run_seconds=1 is up" in said
    last = max(reports(tmp_path))
    assert newest < last and checkpoint_steps(tmp_path)[-1] == last
    for step in set(before) & set(range(newest + 1, last + 1)):
        line = reports(tmp_path)[step]
        assert all(line[name] == before[step][name] for name in ("loss", "grad_norm", "data_hash"))
