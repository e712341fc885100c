"""What a run reports: when, what of its schedule, and where its time went."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pretraining.config.training import TrainConfig
from pretraining.optim.schedule import learning_rate
from tests.parallel.launch import ROOT, environment
from tests.parallel.toy import TOY

pytestmark = pytest.mark.slow
CURVE = {"lr_schedule": "wsd", "lr_warmup_steps": 3, "lr_hold_steps": 2, "num_steps": 9}


def train(folder: Path, **fields: Any) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run on one CPU process."""
    flags = {**TOY, "engine": "torch", "device": "cpu", "log_dir": folder, **fields}
    command = [sys.executable, "main_training.py", *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_reports_come_at_the_interval_with_the_schedule_s_rate_across_a_stop(tmp_path: Path) -> None:
    fields = {**CURVE, "report_interval": 2, "checkpoint_interval": 4}
    config = TrainConfig(**{**TOY, **fields})
    lines = train(tmp_path, **fields)
    (tmp_path / "checkpoints" / "step_9").rename(tmp_path / "away")
    (tmp_path / "checkpoints" / "step_8").rename(tmp_path / "away_too")
    for found in (lines, train(tmp_path, **fields)):
        assert [line["step"] for line in found] == [2, 4, 6, 8, 9]
        tokens = config.global_batch_size * config.seq_length  # type: ignore[operator]
        assert [line["tokens_seen"] for line in found] == [step * tokens for step in (2, 4, 6, 8, 9)]
        rates = [learning_rate(config, step - 1) for step in (2, 4, 6, 8, 9)]
        assert [line["learning_rate"] for line in found] == pytest.approx(rates, rel=1e-12)
    assert len({*rates}) > 2


def test_validation_changes_nothing_and_its_time_is_told_apart(tmp_path: Path) -> None:
    often = {"use_dummy_dataset": True, "val_interval": 2, "val_steps": 3, "log_step_timing": True}
    plain = train(tmp_path / "plain", report_interval=1)
    began = time.perf_counter()
    lines = train(tmp_path / "validated", report_interval=1, checkpoint_interval=2, **often)
    took = time.perf_counter() - began
    reports = [line for line in lines if "loss" in line]
    assert [line["loss"] for line in reports] == [line["loss"] for line in plain]
    parts = ("data_wait_seconds", "train_seconds", "validation_seconds", "checkpoint_seconds")
    assert all(line[part] >= 0 for line in reports for part in parts)
    assert sum(line[part] for line in reports for part in parts) < took
    validated = [line["step"] for line in reports if line["validation_seconds"]]
    assert validated == [3, 5, 7]  # what came after step 2, 4 and 6 lies between two reports
    assert not any(part in line for line in plain for part in parts[1:])
