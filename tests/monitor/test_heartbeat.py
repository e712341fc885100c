"""The heartbeat prints only while its body runs."""

from __future__ import annotations

import threading
import time

import pytest

from pretraining.monitor.progress import heartbeat


def test_it_prints_while_the_body_runs_and_not_after(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with heartbeat("compiling", every=0.02):
        deadline = time.monotonic() + 10
        while len(lines) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
            lines += capsys.readouterr().out.splitlines()
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().out == ""
    assert len(lines) >= 3
    assert all(line.startswith("compiling ... ") for line in lines)


def test_a_quick_body_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with heartbeat("compiling"):
        pass
    assert capsys.readouterr().out == ""


def test_it_stops_when_the_body_raises() -> None:
    with pytest.raises(ZeroDivisionError), heartbeat("compiling", every=0.01):
        raise ZeroDivisionError
    assert all(thread.name != "heartbeat" for thread in threading.enumerate())
