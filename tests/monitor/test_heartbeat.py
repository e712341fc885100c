"""The heartbeat speaks only while something takes long, and stops with it."""

from __future__ import annotations

import threading
import time

import pytest

from pretraining.monitor.heartbeat import heartbeat


def test_it_speaks_while_the_body_runs_and_not_after() -> None:
    told: list[str] = []
    with heartbeat("compiling", every=0.02, tell=told.append):
        deadline = time.monotonic() + 10
        while len(told) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    spoken = len(told)
    time.sleep(0.1)
    assert spoken >= 3
    assert len(told) == spoken
    assert all(line.startswith("compiling ... ") for line in told)


def test_a_quick_body_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with heartbeat("compiling"):
        pass
    assert capsys.readouterr().out == ""


def test_it_stops_when_the_body_fails_and_lets_the_error_through() -> None:
    with pytest.raises(ZeroDivisionError), heartbeat("compiling", every=0.01):
        raise ZeroDivisionError
    assert all(thread.name != "heartbeat" for thread in threading.enumerate())
