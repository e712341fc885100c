"""A run whose global batch grows: its figures, and stopped while it grows and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import main_training
from tests.end_to_end.small import FLAGS, figures

STEPS = 9
FIELDS = {"rampup_batch_size": "4,4,40", "use_dummy_dataset": True, "num_steps": STEPS, "checkpoint_interval": 3}
SIZES = [4, 4, 4, 4, 8, 8, 12, 16, 16]  # 4 more after every 40 / 3 sequences


def train(folder: Path) -> int:
    flags = {**FLAGS, **FIELDS, "log_dir": folder, "engine": "torch", "device": "cpu", "use_torch_compile": False}
    return main_training.main(**{name: str(value) for name, value in flags.items()})


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_while_the_global_batch_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "whole") == 0
    printed = capsys.readouterr().out
    assert "; 4 sequences at first, these from step 8 on (4 sizes); " in printed
    assert f"{sum(SIZES) * 32:,} tokens in {STEPS} steps" in printed
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    assert [line["samples_seen"] for line in lines] == [sum(SIZES[: step + 1]) for step in range(STEPS)]
    assert [line["tokens_per_second"] * line["step_time"] / 32 for line in lines] == pytest.approx(SIZES)

    (tmp_path / "half/checkpoints").mkdir(parents=True)
    shutil.copytree(tmp_path / "whole/checkpoints/step_3", tmp_path / "half/checkpoints/step_3")
    assert train(tmp_path / "half") == 0
    assert figures(tmp_path / "half") == {key: line for key, line in figures(tmp_path / "whole").items() if key[0] > 3}
