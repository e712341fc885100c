"""The progress line and the figures in it: readable in a log file, and never wrong by rounding."""

from __future__ import annotations

import math
import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.extensions.units import amount, flop, size
from pretraining.monitor.figures import duration, format_number, percent
from pretraining.monitor.progress import heartbeat, progress_line
from tests.waiting import wait_until


def record(step: int, **changed: Any) -> dict[str, Any]:
    figures = {"loss": 3.3123, "learning_rate": 1.2e-4, "grad_norm": 0.81, "tokens_per_second": 12345.6}
    return {"step": step, "step_time": 2.0, "loss_spike": False, "mfu": 0.3824, **figures, **changed}


def test_the_line_says_what_a_person_wants_to_know() -> None:
    assert progress_line(record(120), 160, 80) == (
        "step 120/160  75.0%  loss  3.3123  lr 1.20e-04  grad norm   0.810     12,346 tokens/s  MFU 38.2%  ETA 1m20s"
    )
    assert "MFU n/a" in progress_line(record(1, mfu=None), 10, 9)
    assert progress_line(record(9, loss_spike=True), 10, 1).endswith("loss spike")


@given(st.integers(1, 9999), st.floats(0, 20), st.floats(0, 1e6))
def test_the_columns_hold_still_and_nothing_moves_the_cursor(step: int, loss: float, speed: float) -> None:
    line = progress_line(record(step, loss=loss, tokens_per_second=speed), 10_000, 1)
    assert line.index("lr ") == progress_line(record(1), 10_000, 1).index("lr ")
    assert line.isprintable()


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_loss_that_is_not_finite_reads_nan(value: float | None) -> None:
    assert "loss     nan" in progress_line(record(1, loss=value), 10, 9)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (size(0), "0 B"),
        (size(1023), "1023 B"),
        (size(1024), "1.00 KiB"),
        (size(2**30), "1.00 GiB"),
        (size(1.5 * 2**40), "1.50 TiB"),
        (size(2**50), "1,024.00 TiB"),
        (amount(4096), "4,096"),
        (amount(6_738_415_616), "6.74 B"),
        (amount(15e12), "15.00 T"),
        (flop(989.5e12), "989.50 TFLOP"),
        (flop(2500e12), "2.50 PFLOP"),
        (percent(0.3824), "38.2%"),
        (format_number(-1.5, 7, 3), " -1.500"),
        (duration(0), "0s"),
        (duration(59.4), "59s"),
        (duration(59.6), "1m00s"),
        (duration(3599), "59m59s"),
        (duration(3600), "1h00m"),
        (duration(86399), "23h59m"),
        (duration(187200), "2d04h"),
    ],
)
def test_a_figure_carries_its_unit(text: str, expected: str) -> None:
    assert text == expected


@given(st.integers(0, 2**60))
def test_a_size_reads_back_to_within_its_digits(count: int) -> None:
    match = re.fullmatch(r"([\d,.]+) (\w+)", size(count))
    assert match
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[match[2]]
    assert float(match[1].replace(",", "")) * factor == pytest.approx(count, rel=0.01)


def heartbeats() -> list[threading.Thread]:
    """Return the threads that print."""
    return [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_a_heartbeat_prints_while_its_body_runs_and_not_after(capsys: pytest.CaptureFixture[str]) -> None:
    with heartbeat("compiling"):
        pass
    assert capsys.readouterr().out == ""  # a quick body is silent
    lines: list[str] = []
    with heartbeat("compiling", every=0.02):
        wait_until(lambda: bool(lines.extend(capsys.readouterr().out.splitlines())) or len(lines) >= 3)  # type: ignore[func-returns-value]
    assert not heartbeats()
    assert all(line.startswith("compiling ... ") for line in lines)
    with pytest.raises(ZeroDivisionError), heartbeat("compiling", every=0.01):
        raise ZeroDivisionError
    assert not heartbeats()
