"""The procedure of configs.md after a loss spike: back to a checkpoint, and past the data of the spike."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import main_training
from tests.end_to_end.small import FLAGS, figures


def train(folder: Path, **fields: Any) -> None:
    flags = {**FLAGS, "engine": "torch", "device": "cpu", "use_torch_compile": False, "use_dummy_dataset": True}
    flags |= {"num_steps": 8, "lr_decay_steps": 8, "checkpoint_interval": 2, "log_dir": folder, **fields}
    assert main_training.main(**{name: str(value) for name, value in flags.items()}) == 0


@pytest.mark.slow
def test_a_run_goes_back_and_passes_the_data_of_a_spike_over(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train(first)
    (second / "checkpoints").mkdir(parents=True)
    shutil.copy(first / "metrics.jsonl", second)
    shutil.copytree(first / "checkpoints" / "step_4", second / "checkpoints" / "step_4")
    for steps in (6, 8):  # the second command continues the first
        train(second, num_steps=steps, skip_samples="64-95")
    before, after = figures(first), figures(second)
    assert {step: after[step, "loss"] for step in range(1, 5)} == {step: before[step, "loss"] for step in range(1, 5)}
    for step in (5, 6):
        assert after[step, "loss"]["data_hash"] == before[step + 2, "loss"]["data_hash"]
        assert after[step, "loss"]["tokens_seen"] == before[step, "loss"]["tokens_seen"]
        assert after[step, "loss"]["loss"] != before[step, "loss"]["loss"]
