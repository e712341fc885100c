"""Reports of a run: at which steps, with which learning rate, and where the time went."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pretraining.config.training import TrainConfig
from pretraining.monitor.metrics import read_metrics
from pretraining.optim.schedule import learning_rate
from tests.end_to_end.small import reports
from tests.parallel.launch import environment
from tests.parallel.toy import TOY
from tests.processes import call, words
from tests.warm import python

pytestmark = pytest.mark.slow
CURVE = {"lr_schedule": "wsd", "lr_warmup_steps": 3, "lr_hold_steps": 2, "num_steps": 9}


def train(folder: Path, **fields: Any) -> list[dict[str, Any]]:
    """Train in one CPU process, and return the lines of metrics.jsonl."""
    flags = {**TOY, "engine": "torch", "device": "cpu", "log_dir": folder, **fields}
    call([*python(), "main_training.py", *words(flags)], env=environment())
    return read_metrics(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that reports every second step and saves every fourth."""
    folder = tmp_path_factory.mktemp("plain")
    train(folder, **CURVE, report_interval=2, checkpoint_interval=4)
    return folder


def test_reports_come_at_the_interval_with_the_rate_of_the_schedule_across_a_stop(plain: Path, tmp_path: Path) -> None:
    config = TrainConfig(**{**TOY, **CURVE})
    (tmp_path / "checkpoints").mkdir()
    (plain / "checkpoints" / "step_4").rename(tmp_path / "checkpoints" / "step_4")
    shutil.copy(plain / "metrics.jsonl", tmp_path)
    for records in (
        read_metrics(plain / "metrics.jsonl"),
        train(tmp_path, **CURVE, report_interval=2, checkpoint_interval=4),
    ):
        lines = [record for record in records if "loss" in record]
        assert [line["step"] for line in lines] == [1, 2, 4, 6, 8, 9]
        tokens = config.global_batch_size * config.seq_length  # type: ignore[operator]
        assert [line["tokens_seen"] for line in lines] == [step * tokens for step in (1, 2, 4, 6, 8, 9)]
        rates = [learning_rate(config, step - 1) for step in (1, 2, 4, 6, 8, 9)]
        assert [line["learning_rate"] for line in lines] == pytest.approx(rates, rel=1e-12)
    assert len({*rates}) > 2


def test_a_test_that_a_kill_prevented_is_written_once_by_the_next_starts(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    for _ in range(2):
        lines = train(tmp_path, **CURVE, report_interval=2, checkpoint_interval=4, test_steps=2)
        assert [line["step"] for line in lines if "test_loss" in line] == [9]
        assert [line["step"] for line in lines if "loss" in line] == [1, 2, 4, 6, 8, 9]


def test_validation_changes_no_loss(plain: Path, tmp_path: Path) -> None:
    lines = train(tmp_path, **CURVE, report_interval=1, checkpoint_interval=2, val_interval=2, val_steps=3)
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    without = {step: line["loss"] for step, line in reports(plain).items()}
    assert {step: losses[step] for step in without} == without
