"""What is checked and printed between opening the engine and building the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from main_training import CONFIGURATION
from pretraining.checkpoint.manifest import Facts
from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS
from pretraining.monitor.account import Account
from pretraining.monitor.metrics import Metrics
from pretraining.parallel.processes import Processes
from pretraining.parallel.torch import engine as torch_engine
from pretraining.parallel.torch.engine import TorchEngine
from pretraining.run import start as preflight


def engine(processes: int, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[TrainConfig, TorchEngine]:
    """The torch engine of one process among so many on this host."""
    monkeypatch.setattr(torch_engine, "read_processes", lambda: Processes(local_world_size=processes))
    config = CONFIGURATION(device="cpu", model_variant="llama3_194m_4k", **fields)
    opened = TorchEngine(config)
    return opened.config, opened


def test_the_facts_show_the_memory_that_the_engine_s_layout_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    config, opened = engine(1, monkeypatch, sharding_strategy="zero2", batch_size=1)
    opened.mesh = opened.mesh._replace(shard=8)
    opened.layout = opened.layout._replace(mesh=opened.mesh)
    (line,) = (line for line in preflight.describe_run(opened.config, opened).splitlines() if line.startswith("memory"))
    whole = 4 * VARIANTS[config.model_variant].parameters
    assert f"parameters {whole / 8 / 2**20:.2f} MiB" in line


def test_settings_without_effect_are_named() -> None:
    config = CONFIGURATION(val_steps=5, test_data_path="held", num_epochs=2, use_dummy_dataset=True)
    assert preflight.settings_without_effect(config) == [
        "val_steps: no effect without val_interval",
        "test_data_path: no effect without test_steps",
        "num_epochs: no effect with use_dummy_dataset",
    ]
    used = CONFIGURATION(val_steps=5, val_interval=9, num_epochs=2)
    assert preflight.settings_without_effect(used) == []


def test_an_error_of_the_file_system_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preflight, "open_metrics", is_full)
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
