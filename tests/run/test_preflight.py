"""What is checked and printed between opening the engine and building the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from main_training import CONFIGURATION
from pretraining.checkpoint.manifest import Facts
from pretraining.config.errors import UserError
from pretraining.monitor.account import Account
from pretraining.monitor.metrics import Metrics
from pretraining.run import start as preflight
from tests.faults.damage import fill_disk


def test_an_error_of_the_file_system_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "open_metrics", fill_disk)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
        preflight.open_run_folder(CONFIGURATION(log_dir=str(tmp_path)), None, Account())


def test_a_shorter_history_is_said_when_a_run_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGURATION(log_dir=str(tmp_path), report_interval=5)
    at_20 = Facts(step=20, tokens_seen=0, data=None, config={}, engine="torch", mesh={})
    preflight.open_run_folder(config, at_20, Account()).close()
    assert "note: " in (shown := capsys.readouterr().out) and "metrics.jsonl is missing" in shown
    preflight.open_run_folder(replace(config, report_interval=100), None, Account()).close()
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write({"step": 20, "loss": 1.0})
    metrics.close()
    preflight.open_run_folder(config, at_20, Account()).close()
    assert "note" not in capsys.readouterr().out
