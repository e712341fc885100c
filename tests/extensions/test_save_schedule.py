"""Checkpoints at powers of the interval and at further steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from main_training import CONFIGURATION
from tests.checkpoint.test_checkpoints import run, steps

LOG: dict[str, Any] = {"checkpoint_interval": 2, "checkpoint_scale": "log"}
EXTRA: dict[str, Any] = {"checkpoint_interval": 100, "extra_checkpoint_steps": "0,1,5"}


@pytest.mark.parametrize(("fields", "expected"), [(LOG, [1, 2, 4, 8]), (EXTRA, [0, 1, 5, 8])])
def test_a_run_leaves_the_checkpoints_that_were_asked_for(
    tmp_path: Path, fields: dict[str, Any], expected: list[int]
) -> None:
    run(tmp_path, **fields)
    assert steps(tmp_path) == expected


def test_both_settings_add_up_with_the_last_step() -> None:
    config = CONFIGURATION(**LOG, extra_checkpoint_steps="0, 5,7", num_steps=11)
    assert [step for step in range(12) if config.saves_at(step)] == [0, 1, 2, 4, 5, 7, 8, 11]


def test_the_disk_of_default_checkpoints_is_a_fact() -> None:
    tiny: dict[str, Any] = {"model_variant": "tiny", "num_steps": 1_000_000}
    line = CONFIGURATION(**tiny).facts["checkpoints"]  # 4,008,384 parameters with two moments, 12 bytes each
    start = "every 10,000 steps up to 1,000,000 (default: num_steps, checkpoint_interval), 100 x 45.87 MiB"
    assert line.startswith(start)
    assert "= 4.48 GiB of disk" in line
    kept = CONFIGURATION(**tiny | {"num_steps": 50_001}, keep_last_n_checkpoints=2).facts["checkpoints"]
    assert "(default: checkpoint_interval), 2 x" in kept
    chosen: list[dict[str, Any]] = [{"num_steps": 9, "checkpoint_interval": 3}, {"checkpoint_interval": 0}]
    assert not any("checkpoints" in CONFIGURATION(**tiny | fields).facts for fields in chosen)
