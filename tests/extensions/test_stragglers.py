"""Reports name the slowest process."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretraining.extensions.stragglers.watch import SLOW, Lap, spread
from tests.end_to_end.small import reports
from tests.parallel.launch import environment, launched
from tests.parallel.toy import TOY
from tests.processes import call, words


def test_the_slowest_process_is_compared_with_the_median_one() -> None:
    laps = [Lap("a", 0.5, 7, 2.0), Lap("a", 0.1, 9, 3.0), Lap("b", 0.0, 8, 2.5), Lap("b", 0.2, 8, 2.0)]
    assert spread(laps) == {
        "data_wait_seconds_max": 0.5,
        "memory_bytes_max": 9,
        "straggler": 1,
        "straggler_ratio": 3.0 / 2.0,
    }
    assert spread([Lap("a", 0.5, 0, 0.0)]) == {"data_wait_seconds_max": 0.5}  # of the xla engine on CPUs


@pytest.mark.slow
def test_the_reports_of_two_processes_have_the_spread(tmp_path: Path) -> None:
    settings = {**TOY, "engine": "torch", "device": "cpu", "num_steps": 3, "report_interval": 1, "log_dir": tmp_path}
    command = launched(2, "main_training.py", *words({**settings, "log_stragglers": True}))
    done = call(command, env=environment())
    lines = reports(tmp_path).values()
    assert len(lines) == 3
    for line in lines:
        assert line["straggler"] in (0, 1) and line["straggler_ratio"] >= 1
        assert line["data_wait_seconds_max"] >= 0 and line["memory_bytes_max"] > 0
    slow = [line for line in lines if line["straggler_ratio"] > SLOW]
    assert done.stdout.count("times the median's time") == len(slow)
