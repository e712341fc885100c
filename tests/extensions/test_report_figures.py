"""The norm of the parameters and the account of the time, in every report that is asked for them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.store import is_weight
from pretraining.extensions.checkpoints import read_tensors
from tests.end_to_end.small import reports
from tests.end_to_end.test_reports import CURVE, train
from tests.parallel.launch import environment
from tests.parallel.toy import TOY
from tests.processes import call, words
from tests.warm import python

PARTS = ("train_seconds", "validation_seconds", "checkpoint_seconds")


def norm_of(folder: Path, step: int) -> float:
    """The L2 norm of the weights in a run's checkpoint."""
    weights = read_tensors(open_checkpoint(folder / "checkpoints" / f"step_{step}"), is_weight)
    return math.hypot(*(weight.float().norm().item() for weight in weights.values()))


@pytest.mark.slow
def test_reports_have_the_figures_that_are_asked_for_and_no_others(tmp_path: Path) -> None:
    often = {"report_interval": 1, "checkpoint_interval": 2, "val_interval": 2, "val_steps": 3}
    began = time.perf_counter()
    lines = train(tmp_path / "more", **CURVE, **often, log_step_timing=True, log_param_norm=True)
    seconds = time.perf_counter() - began
    by_step = {line["step"]: line for line in lines if "loss" in line}
    times = [line[part] for line in by_step.values() for part in (*PARTS, "data_wait_seconds")]
    assert min(times) >= 0 and sum(times) < seconds
    # what follows steps 2, 4, 6 and 8 counts for the next report
    assert [step for step, line in by_step.items() if line["validation_seconds"]] == [3, 5, 7, 9]
    for step in (2, 8):
        assert by_step[step]["param_norm"] == pytest.approx(norm_of(tmp_path / "more", step), rel=1e-6)
    plain = train(tmp_path / "plain", **CURVE)
    assert not any(name in line for line in plain for name in (*PARTS, "param_norm"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["xla", "torch"])
def test_the_norm_of_bf16_parameters_is_not_rounded(engine: str, tmp_path: Path) -> None:
    device = {} if engine == "xla" else {"device": "cpu"}
    flags: dict[str, Any] = {"engine": engine, "mixed_precision": True, "precision": "bf16_sr", **device}
    flags |= {"num_steps": 2, "checkpoint_interval": 2, "report_interval": 1}
    flags |= {"log_param_norm": True, "log_dir": str(tmp_path)}
    variables = environment(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2")
    call([*python(), "main_training.py", *words({**TOY, **flags})], env=variables)
    norm = norm_of(tmp_path, 2)  # after the update of a step
    assert reports(tmp_path)[2]["param_norm"] == pytest.approx(norm, rel=1e-5)
