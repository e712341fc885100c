"""fp16 with its loss scale: the rule is DeepSpeed's, the losses are those of fp32, and overflows cost a step each."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from main_training import CONFIGURATION
from pretraining.extensions.fp16.scale import LossScale
from tests.parallel.launch import ALONE, assert_resumed, run_on_torch
from tests.parallel.toy import TOY
from tests.selection import Outcomes, chosen

Fields = dict[str, Any]
CPU = torch.device("cpu")
FP16: Fields = {"precision": "fp16", "mixed_precision": True, "num_layers": 2}
CASES: dict[str, Fields] = {
    "fp32": {"num_layers": 2},
    "fp16": FP16,
    "recomputed, accumulated": {**FP16, "batch_size": 1, "fsdp_activation_checkpointing": True},
    "fixed": {**FP16, "loss_scale": 128.0},
    "rising": {**FP16, "initial_scale_power": 4, "loss_scale_window": 3},
    "overflowing": {**FP16, "initial_scale_power": 26, "loss_scale_hysteresis": 1, "num_steps": 16},
    "overflowing at the least": {**FP16, "initial_scale_power": 30, "min_loss_scale": 2.0**30, "max_skipped_steps": 2},
}


def deepspeed(scale: float, window: int, hysteresis: int, least: float, finite: list[bool]) -> list[float]:
    """The scale after each step, by DynamicLossScaler's rule as its authors describe it, on the host."""
    left, last, found = hysteresis, -1, []
    for step, good in enumerate(finite):
        if not good:
            if left == 1:
                scale = max(scale / 2, least)
            else:
                left -= 1
            last = step
        elif (step - last) % window == 0:
            scale, left = scale * 2, hysteresis
        found.append(scale)
    return found


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 4), st.lists(st.booleans(), max_size=40))
def test_the_dynamic_scale_is_deepspeed_s(power: int, window: int, hysteresis: int, finite: list[bool]) -> None:
    config = CONFIGURATION(
        initial_scale_power=power, loss_scale_window=window, loss_scale_hysteresis=hysteresis, min_loss_scale=4.0
    )
    scaling, found = LossScale(config, CPU), []
    for good in finite:
        scaling.update(torch.tensor(good))
        found.append(scaling.scale.item())
    assert found == deepspeed(2.0**power, window, hysteresis, 4.0, finite)


CHOSEN = {ALONE: ("fp32", "overflowing"), 2: ("rising", "overflowing")}


@functools.cache
def outcome(processes: int) -> dict[str, Any]:
    """Every case on this many processes, one of them stopped and resumed."""
    with tempfile.TemporaryDirectory() as folder:
        cases = {**CASES, "rising": {**CASES["rising"], "halfway": f"{folder}/run"}}
        return Outcomes(run_on_torch(processes, chosen(cases, CHOSEN[processes])))


both = pytest.mark.parametrize("processes", [ALONE, 2])


@pytest.mark.slow
@both
@pytest.mark.parametrize("case", ["fp16", "recomputed, accumulated", "fixed", "rising"])
def test_losses_are_those_of_fp32_within_a_thousandth(processes: int, case: str) -> None:
    found, wanted = outcome(processes)[case], outcome(ALONE)["fp32"]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=2e-2)
    assert found["updates"] == TOY["num_steps"]


@pytest.mark.slow
@both
def test_overflows_skip_steps_until_the_scale_fits_and_are_not_counted_as_refused(processes: int) -> None:
    found = outcome(processes)["overflowing"]
    scales = found["loss_scale"]
    fell = sum(scale < before for before, scale in zip([2.0**26, *scales], scales, strict=False))
    assert fell >= 3
    assert found["updates"] == 16 - fell
    assert found["refused"][-1] == [0.0, 0.0]
    assert found["loss"][-1] < found["loss"][0] - 0.1


@pytest.mark.slow
@both
def test_overflows_at_the_minimum_scale_are_refused_updates(processes: int) -> None:
    found = outcome(processes)["overflowing at the least"]
    assert found["updates"] == 0
    assert found["refused"][-1] == [float(TOY["num_steps"]), 1.0]


@pytest.mark.slow
@both
def test_a_resumed_run_continues_with_its_loss_scale_bitwise(processes: int) -> None:
    assert_resumed(outcome(processes)["rising"])
