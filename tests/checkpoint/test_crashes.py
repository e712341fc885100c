"""Killed at any instant, a run loses nothing that was committed and continues bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).with_name("crash_driver.py")
RETENTION = ["--keep_last_n_checkpoints=2", "--checkpoint_interval=1"]


def drive(folder: Path, kind: str, *flags: str) -> dict[str, Any]:
    """What the driver found."""
    done = subprocess.run(
        [sys.executable, DRIVER, folder, kind, *flags], stdout=subprocess.PIPE, check=True, timeout=600
    )
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict[str, Any]) -> None:
    """Zero lost, zero corrupt, and the same losses."""
    for case in found["cases"]:
        assert case["continued"], case
        assert not case["damaged"], case
        assert case["losses"] == found["reference"], case
        newest = max(case["visible"], default=0)
        assert case["steps_again"] == 8 - newest, case
        assert case["left"] == ["lock", "step_7", "step_8"], case


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_kill_before_any_write_fsync_rename_or_removal_loses_nothing(tmp_path: Path, background: str) -> None:
    found = drive(tmp_path, "calls", *RETENTION, f"--async_checkpointing={background}")
    check(found)
    killed = [case for case in found["cases"] if case["killed"]]
    assert len(killed) >= 40
    assert {case["point"][1] for case in killed} == {"pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir"}


def test_a_kill_at_a_random_instant_loses_nothing(tmp_path: Path) -> None:
    found = drive(tmp_path, "instants", *RETENTION)
    check(found)
    assert sum(case["killed"] for case in found["cases"]) >= 10  # the others had finished
