"""The norm of the parameters and the account of the time, in every report that is asked for them."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.store import is_weight
from pretraining.extensions.checkpoints import read_tensors
from tests.end_to_end.test_reports import CURVE, train

PARTS = ("train_seconds", "validation_seconds", "checkpoint_seconds")


@pytest.mark.slow
def test_reports_have_the_figures_that_are_asked_for_and_no_others(tmp_path: Path) -> None:
    often = {"report_interval": 1, "checkpoint_interval": 2, "val_interval": 2, "val_steps": 3}
    began = time.perf_counter()
    lines = train(tmp_path / "more", **CURVE, **often, log_step_timing=True, log_param_norm=True)
    seconds = time.perf_counter() - began
    reports = {line["step"]: line for line in lines if "loss" in line}
    times = [line[part] for line in reports.values() for part in (*PARTS, "data_wait_seconds")]
    assert min(times) >= 0 and sum(times) < seconds
    # what follows steps 2, 4, 6 and 8 counts for the next report
    assert [step for step, line in reports.items() if line["validation_seconds"]] == [3, 5, 7, 9]
    for step in (2, 8):
        weights = read_tensors(open_checkpoint(tmp_path / "more" / "checkpoints" / f"step_{step}"), is_weight)
        norm = math.hypot(*(weight.norm().item() for weight in weights.values()))
        assert reports[step]["param_norm"] == pytest.approx(norm, rel=1e-6)
    plain = train(tmp_path / "plain", **CURVE)
    assert not any(name in line for line in plain for name in (*PARTS, "param_norm"))
