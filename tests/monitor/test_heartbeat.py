"""The heartbeat prints only while its body runs."""

from __future__ import annotations

import threading

import pytest

from pretraining.monitor.progress import heartbeat
from tests.waiting import wait_until


def test_it_prints_while_the_body_runs_and_not_after(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with heartbeat("compiling", every=0.02):
        wait_until(lambda: bool(lines.extend(capsys.readouterr().out.splitlines())) or len(lines) >= 3)  # type: ignore[func-returns-value]
    assert all(thread.name != "heartbeat" for thread in threading.enumerate())
    assert all(line.startswith("compiling ... ") for line in lines)


def test_a_quick_body_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with heartbeat("compiling"):
        pass
    assert capsys.readouterr().out == ""


def test_it_stops_when_the_body_raises() -> None:
    with pytest.raises(ZeroDivisionError), heartbeat("compiling", every=0.01):
        raise ZeroDivisionError
    assert all(thread.name != "heartbeat" for thread in threading.enumerate())
